"""Data that needs no download: handwritten digits, a network for them, and random vectors."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset


@cache
def _split_digits() -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
    """Return images (N, 8, 8) uint8 and labels (N,) int64, for train=True (80%) and False (20%)."""
    rows = torch.from_numpy(np.loadtxt(_digits_file(), delimiter=","))  # (N, 65): image, label
    # The file's gray levels go from 0 to 16; an image's pixels go up to 255.
    images = (rows[:, :-1] * (255 / 16)).round().to(torch.uint8).reshape(-1, 8, 8)
    labels = rows[:, -1].to(torch.int64)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[labels.argsort(stable=True)[::5]] = True  # every fifth image of each digit
    return {
        train: (images[held_out != train], labels[held_out != train]) for train in (True, False)
    }


def _digits_file() -> Path:
    """Return the path to scikit-learn's digits.

    scikit-learn itself isn't imported: that takes longer than reading the file.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn, which isn't installed")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


class Digits(Dataset):
    """1,797 handwritten digits of 8 by 8 pixels, as a torchvision-style dataset.

    They come from scikit-learn's ``load_digits``: the test split of the UCI "Optical Recognition of
    Handwritten Digits" data set (Alpaydin and Kaynak, 1998), written by 13 people. ``train=True``
    has 1,437 of them, ``train=False`` the other 360: every fifth image of each digit.

    ``data`` is (N, 8, 8) uint8, ``targets`` (N,) int64. An item is ``(image, label)``: a PIL image
    in mode "L", after its transform if there is one, and an int.
    """

    classes = [str(digit) for digit in range(10)]  # noqa: RUF012

    def __init__(
        self,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.train = train
        self.transform = transform
        self.data, self.targets = _split_digits()[train]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image: Any = Image.fromarray(self.data[index].numpy(), mode="L")
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.targets[index])

    def __repr__(self) -> str:
        return f"Digits(train={self.train}): {len(self)} images of 8 by 8 pixels, 10 classes"


class DigitsCNN(nn.Module):
    """A small convolutional network for 8 by 8 grayscale images.

    Maps (B, 1, 8, 8) floats to (B, 10) logits; 21,546 parameters at the default width.
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


class RandomDataset(Dataset):
    """``length`` vectors of ``size`` random numbers; an item is one vector of shape (size,)."""

    def __init__(self, size: int, length: int) -> None:
        self.length = length
        self.data = torch.randn(length, size)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]
