"""Data that need no download: real handwritten digits, and random vectors for shape lessons."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset


@cache
def _split_digits() -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
    """Images (N, 8, 8) uint8 and labels (N,) int64 for train=True (80 %) and train=False (20 %)."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = parts
    return {True: _as_tensors(train_x, train_y), False: _as_tensors(test_x, test_y)}


def _as_tensors(images: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # The bundled grey levels go from 0 to 16; pictures go to 255.
    grey = torch.as_tensor(images).reshape(-1, 8, 8) * (255 / 16)
    return grey.round().to(torch.uint8), torch.as_tensor(labels, dtype=torch.int64)


class Digits(Dataset):
    """1797 handwritten digits of 8 by 8 pixels, as a torchvision-style dataset.

    From scikit-learn's ``load_digits``: the test part of the UCI "Optical Recognition of
    Handwritten Digits" set (Alpaydin and Kaynak, 1998), written by 13 people. ``train=True`` holds
    1437 of them, ``train=False`` the other 360; the split is fixed and stratified by label.

    ``data`` is (N, 8, 8) uint8, ``targets`` (N,) int64. An item is ``(image, label)``: a PIL image
    in mode "L" and an int, each after its transform if one is given.
    """

    classes = [str(digit) for digit in range(10)]  # noqa: RUF012

    def __init__(
        self,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
    ) -> None:
        self.train = train
        self.transform = transform
        self.target_transform = target_transform
        self.data, self.targets = _split_digits()[train]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image: Any = Image.fromarray(self.data[index].numpy(), mode="L")
        label: Any = int(self.targets[index])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label

    def __repr__(self) -> str:
        return f"Digits(train={self.train}): {len(self)} images of 8 by 8 pixels, 10 classes"


class RandomDataset(Dataset):
    """``length`` vectors of ``size`` random numbers; an item is one vector of shape (size,)."""

    def __init__(self, size: int, length: int) -> None:
        self.length = length
        self.data = torch.randn(length, size)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]
