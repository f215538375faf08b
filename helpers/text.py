"""English text without downloads, character by character: the topics of Python's ``help()``.

    tokens = letters(train=True)                          # (N,) int64, one per character
    inputs, targets = next(batches(tokens, 8, length=64))  # (8, 64) each; targets are shifted by one

The text differs slightly between versions of Python; the vocabulary doesn't.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import nn

VOCABULARY = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""Newline and the 95 printable ASCII characters; a character's index is its token."""

_NUMBERS = {letter: number for number, letter in enumerate(VOCABULARY)}

# Non-ASCII characters in the topics, and their ASCII replacements.
_PLAIN = {"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "--", "…": "...", "\t": "    "}


def encode(text: str) -> torch.Tensor:
    """Return each character's token, (N,) int64. Raises ValueError for characters not in VOCABULARY."""
    for place, letter in enumerate(text):
        if letter not in _NUMBERS:
            raise ValueError(
                f"character {letter!r} at position {place} isn't one of the {len(VOCABULARY)} in "
                "helpers.text.VOCABULARY (newline and printable ASCII). Leave it out, or "
                "write it in ASCII."
            )
    return torch.tensor([_NUMBERS[letter] for letter in text], dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """Return the text for (N,) tokens.

    Raises ValueError for other shapes or dtypes, and for numbers out of range.
    """
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
        raise ValueError(
            f"decode takes integers of shape (N,); got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}. Decode a batch row by row; take the argmax of logits first."
        )
    numbers = tokens.tolist()
    for place, number in enumerate(numbers):
        if not 0 <= number < len(VOCABULARY):
            raise ValueError(
                f"number {number} at position {place} isn't a token: tokens go from 0 to "
                f"{len(VOCABULARY) - 1}."
            )
    return "".join(VOCABULARY[number] for number in numbers)


@cache
def _all_letters() -> torch.Tensor:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    for letter, plain in _PLAIN.items():
        text = text.replace(letter, plain)
    # Every rank of a training run encodes the text, and one character at a time would be too slow.
    numbers = torch.full((128,), -1)
    numbers[[ord(letter) for letter in VOCABULARY]] = torch.arange(len(VOCABULARY))
    codes = torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8)
    tokens = numbers[codes.long()]
    return tokens[tokens >= 0]  # other control characters have no number


def letters(train: bool = True) -> torch.Tensor:
    """Return the tokens of all topics, sorted by name, as (N,) int64.

    ``train=True`` is the first 90%, more than 300,000 characters; ``train=False`` is the last 10%, for
    evaluation only. A few sentences are in both, since topics quote each other.
    """
    every = _all_letters()
    cut = len(every) * 9 // 10
    return every[:cut] if train else every[cut:]


def batches(
    tokens: torch.Tensor,
    batch_size: int,
    length: int,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    skip: int = 0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one rank's inputs and targets, (batch_size / world_size, length) int64, without end.

    Sequences start at random positions, redrawn for each batch; a target is the character after its input.
    ``batch_size`` counts the sequences of all ranks. The same seed gives the same sequences for any
    ``world_size``, and the ranks split them in order, so the concatenated batches of all ranks are the
    batch of a single process. The first ``skip`` batches are left out, without reading their tokens.
    Raises ValueError for sizes that don't fit.
    """
    if tokens.dim() != 1 or len(tokens) <= length or length < 1:
        raise ValueError(
            f"sequences of {length} characters plus the one that follows can't be cut from tokens "
            f"of shape {tuple(tokens.shape)}: batches needs (N,) with N above {length}, and a "
            "positive length."
        )
    if world_size < 1 or batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"{batch_size} sequences can't be divided equally among {world_size} ranks: "
            "batch_size counts those of all ranks, and must be a multiple of world_size."
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} isn't one of {world_size} ranks, which are numbered from 0.")
    if skip < 0:
        raise ValueError(f"skip must be 0 or more batches, got {skip}")
    return _drawn(tokens, batch_size, length, seed, rank, world_size, skip)


def _drawn(
    tokens: torch.Tensor,
    batch_size: int,
    length: int,
    seed: int,
    rank: int,
    world_size: int,
    skip: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1)
    for number in itertools.count():
        starts = torch.randint(len(tokens) - length, (batch_size,), generator=generator)
        if number < skip:
            continue
        own = starts.chunk(world_size)[rank]
        sequences = tokens[own[:, None] + window].long()  # (batch_size / world_size, length + 1)
        yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: str = "The ",
    count: int = 200,
    *,
    window: int = 64,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Continue the prompt with ``count`` characters sampled from the model one at a time.

    ``model`` maps (1, S) integers to (1, S, 96) logits, and sees the last ``window`` characters. A
    low temperature favors likely characters. Sampling runs on the CPU, so it depends only on the seed and the
    logits. Every character takes a forward pass: with a sharded model, all ranks must sample. Raises
    ValueError for an empty prompt, or a temperature that isn't positive.
    """
    if not prompt:
        raise ValueError(
            "the prompt is empty; the model needs at least one character to continue from, such as 'T'."
        )
    if temperature <= 0:
        raise ValueError(f"the temperature must be positive; got {temperature}.")
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = encode(prompt)
    for _ in range(count):
        logits = model(tokens[None, -window:].to(device))[0, -1].float().cpu()  # (96,)
        drawn = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn])
    return decode(tokens)
