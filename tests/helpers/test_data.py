"""The digits, the random vectors, and the network that classifies the digits."""

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from helpers.data import Digits, DigitsCNN, RandomDataset


def test_the_split_covers_all_digits_once():
    train, held_out = Digits(train=True), Digits(train=False)
    assert (len(train), len(held_out)) == (1437, 360)
    ours = torch.cat([train.data, held_out.data]).flatten(1).tolist()
    # Gray level 16 becomes 255.
    theirs = (load_digits().data * 255 / 16).round().astype(int).tolist()
    assert sorted(ours) == sorted(theirs)


def test_the_split_is_stratified():
    train, held_out = Digits(train=True), Digits(train=False)
    for digit in range(10):
        share = (train.targets == digit).float().mean() - (held_out.targets == digit).float().mean()
        assert abs(share) < 0.005


def test_items_look_like_items_of_torchvisions_datasets():
    image, label = Digits()[0]
    assert image.mode == "L" and image.size == (8, 8) and isinstance(label, int)
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    dataset = Digits(transform=transform)
    tensor, same_label = dataset[0]
    assert tensor.shape == (1, 8, 8) and 0 <= tensor.min() <= tensor.max() <= 1
    assert same_label == label
    torch.testing.assert_close(tensor[0], dataset.data[0] / 255)


def test_digits_raise_index_error_past_the_end():
    with pytest.raises(IndexError):
        Digits(train=False)[360]


def test_random_dataset_has_vectors_of_the_given_size():
    dataset = RandomDataset(size=5, length=7)
    assert len(dataset) == 7 and dataset[3].shape == (5,)


def test_the_network_has_as_many_parameters_as_its_docstring_says():
    model = DigitsCNN()
    assert f"{sum(p.numel() for p in model.parameters()):,}" in DigitsCNN.__doc__
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
