"""Descriptions of values: different values look different, and differences are located."""

import math

import pytest
import torch
from torch import nn

from helpers.checks.describing import describe, difference, told_apart

LARGE = torch.zeros(4, 5)


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("yours", "expected"),
    [
        ("3", 3),
        (True, "True"),
        (1.0, 1.0 + 1e-12),
        (float("nan"), 1.0),
        (LARGE, changed(LARGE, (1, 2), 1e-9)),
        (LARGE, LARGE.double()),
        (torch.zeros(3), torch.full((3,), 1e-7)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(3), [0.0, 0.0, 0.0]),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        ((1, 2), [1, 2]),
        ("a" * 400 + "b", "a" * 400 + "c"),
    ],
    ids=str,
)
def test_different_values_never_look_the_same(yours, expected):
    mine, theirs = told_apart(yours, expected)
    assert mine != theirs


@pytest.mark.parametrize(
    ("yours", "expected", "phrases"),
    [
        (changed(LARGE, (1, 2), 0.25), LARGE, ["at most 0.25", "[1, 2]", "1 of 20"]),
        (changed(LARGE, (3, 4), math.nan), LARGE, ["at most inf", "[3, 4]", "1 of 20"]),
        (changed(LARGE, (0, 0), math.inf), changed(LARGE, (0, 0), math.inf), ["at most 0"]),
        (torch.zeros(3), torch.zeros(4), ["shape (3,), not (4,)"]),
        (torch.zeros(3), torch.zeros(3).long(), ["float32, not torch.int64"]),
        (torch.tensor(1.5), torch.tensor(1.0), ["0.5"]),
        ([1, 2, 9], [1, 3, 4], ["most at [2]: 9, not 4", "2 of 3 differ"]),
        (["a", "b"], ["a", "c"], ["first at [1]: 'b', not 'c'", "1 of 2"]),
        ([1, 2], (1, 2), ["a list of 2, not a tuple of 2"]),
        ({"a": 1}, {"b": 1}, ["lacks 'b'", "also has 'a'"]),
        ({"a": "x", "b": "y"}, {"a": "x", "b": "z"}, ["['b']: 'y', not 'z'"]),
        (2, 5, []),
        (2.0, 2, []),
        (1.25, 1.0, ["0.25"]),
    ],
)
def test_difference_says_where_the_largest_difference_is(yours, expected, phrases):
    said = difference(yours, expected)
    assert all(phrase in said for phrase in phrases), said
    assert bool(said) == bool(phrases)


def test_describe_shows_the_shape_of_a_large_tensor_and_the_class_of_a_module():
    batch = {"images": torch.rand(4, 4), "where": torch.device("cpu"), "model": nn.Linear(3, 3)}
    shape = "a tensor of shape (4, 4), float32, on cpu"
    assert describe(batch) == f"{{'images': {shape}, 'where': cpu, 'model': a Linear}}"
    assert describe([(LARGE[0],)]) == "[(tensor([0., 0., 0., 0., 0.]),)]"
    assert len(describe("long " * 100)) == 300
