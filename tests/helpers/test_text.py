"""Characters of Python's own help: encoded, split, divided into batches for ranks, and learned."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.text import VOCABULARY, batches, decode, encode, letters, sample
from vgpu.plan.transformer import LETTERS, Transformer


def test_the_vocabulary_is_newline_and_printable_ascii():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == LETTERS.vocabulary == 96
    assert VOCABULARY.isascii() and VOCABULARY.replace("\n", "").isprintable()


def test_decode_is_the_inverse_of_encode():
    tokens = encode(VOCABULARY)
    assert tokens.tolist() == list(range(96))
    assert decode(tokens) == VOCABULARY
    assert decode(encode("")) == ""


def test_a_character_outside_the_vocabulary_is_named_with_its_position():
    with pytest.raises(ValueError, match=r"character 'ß' at position 3 .*printable ASCII"):
        encode("Spaß")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 96]), r"number 96 at position 1 .* 0 to 95"),
        (torch.tensor([-1]), "number -1 at position 0"),
        (torch.zeros(2, 3, dtype=torch.int64), r"shape \(2, 3\).* row by row"),
        (torch.zeros(3), r"torch.float32 of shape \(3,\)"),
    ],
)
def test_decode_rejects_tensors_that_are_not_text(tokens, message):
    with pytest.raises(ValueError, match=message):
        decode(tokens)


def test_training_and_held_out_text_are_separate_and_long():
    train, held_out = letters(train=True), letters(train=False)
    assert len(train) > 300_000 and len(held_out) == pytest.approx(len(train) / 9, rel=1e-3)
    whole = torch.cat([train, held_out])
    assert decode(whole[: len('The "assert" statement')]) == 'The "assert" statement'
    assert whole.unique().numel() > 90, "nearly the whole vocabulary must be used"


def test_targets_are_the_characters_after_their_inputs():
    tokens = torch.arange(100)
    inputs, targets = next(batches(tokens, 50, length=7))
    assert inputs.shape == targets.shape == (50, 7)
    torch.testing.assert_close(targets, inputs + 1)
    assert inputs.min() < 10 and targets.max() > 90, "sequences must begin anywhere"


def test_skipped_batches_are_not_drawn_again():
    fourth = list(itertools.islice(batches(letters(), 4, 8), 4))[-1]
    first = next(batches(letters(), 4, 8, skip=3))
    assert all(torch.equal(*pair) for pair in zip(fourth, first, strict=True))
    with pytest.raises(ValueError, match="skip must be 0 or more batches, got -1"):
        batches(letters(), 4, 8, skip=-1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_divide_the_batches_of_a_single_process(world_size):
    tokens = letters()
    whole = batches(tokens, 8, length=16, seed=3)
    parts = [
        batches(tokens, 8, length=16, seed=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(3):
        of_ranks = [next(part) for part in parts]
        for kind, expected in enumerate(next(whole)):
            assert torch.equal(torch.cat([pair[kind] for pair in of_ranks]), expected)


@pytest.mark.parametrize(
    ("tokens", "asked", "message"),
    [
        (
            torch.arange(8),
            {"batch_size": 1, "length": 8},
            r"\(8,\): batches needs \(N,\) with N above",
        ),
        (torch.arange(8)[None], {"batch_size": 1, "length": 2}, r"shape \(1, 8\)"),
        (torch.arange(8), {"batch_size": 1, "length": 0}, "a positive length"),
        (
            torch.arange(8),
            {"batch_size": 6, "length": 2, "world_size": 4},
            "6 sequences .* 4 ranks",
        ),
        (torch.arange(8), {"batch_size": 4, "length": 2, "rank": 1}, "rank 1 isn't one of 1 ranks"),
    ],
)
def test_impossible_batches_are_rejected_immediately(tokens, asked, message):
    with pytest.raises(ValueError, match=message):
        batches(tokens, **asked)


def test_a_sequence_longer_than_the_models_limit_is_rejected():
    with pytest.raises(ValueError, match=r"sequence of 9 tokens is longer than the 8"):
        Transformer(replace(LETTERS, sequence=8))(torch.zeros(1, 9, dtype=torch.int64))


def test_the_character_model_has_as_many_parameters_as_its_comment_says():
    assert sum(p.numel() for p in Transformer(LETTERS).parameters()) == 352_896


class NextLetter(nn.Module):
    """A model that's certain that the next character is the next one in the vocabulary."""

    def __init__(self):
        super().__init__()
        self.sure = nn.Parameter(torch.tensor(100.0))
        self.longest = 0

    def forward(self, tokens):
        self.longest = max(self.longest, tokens.size(1))
        return self.sure * F.one_hot((tokens + 1) % 96, 96)


def test_a_sample_continues_the_prompt_with_likely_characters():
    model = NextLetter()
    assert sample(model, "ab", count=5, window=4) == "abcdefg"
    assert model.longest == 4


def test_a_sample_depends_only_on_its_seed():
    model = Transformer(LETTERS)
    first, same, other = (sample(model, count=20, seed=seed) for seed in (0, 0, 1))
    assert first == same != other and first.startswith("The ")


@pytest.mark.parametrize(
    ("asked", "message"), [({"prompt": ""}, "empty"), ({"temperature": 0}, "positive; got 0")]
)
def test_a_sample_that_cannot_be_drawn_is_rejected(asked, message):
    with pytest.raises(ValueError, match=message):
        sample(NextLetter(), **asked)
