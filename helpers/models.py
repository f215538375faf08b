"""The convolutional network that several lessons train."""

import torch
from torch import nn


class DigitsCNN(nn.Module):
    """A small convolutional network for 8 by 8 grey images.

    (B, 1, 8, 8) float in, (B, 10) logits out; 21,546 parameters at the default width.
    """

    def __init__(self, width: int = 16, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),  # (B, width, 8, 8)
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),  # (B, 2 width, 8, 8)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 2 width, 4, 4)
        )
        self.head = nn.Sequential(
            nn.Flatten(),  # (B, 32 width)
            nn.Linear(32 * width, 2 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))
