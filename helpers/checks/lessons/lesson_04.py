"""Checks for lesson 04: what each replica of a DataParallel model sees."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers import devices
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input


def _sizes(batch_size: int, gpu_count: int) -> list[int]:
    """Return the sizes from ``torch.chunk``, which scatter uses."""
    return [len(chunk) for chunk in torch.empty(batch_size).chunk(gpu_count)]


@exercise("4.1", "Sizes for any batch")
def replica_sizes(answer: Callable[[int, int], list[int]]) -> dict[str, Any]:
    cases = [(random.randint(1, 12), random.randint(1, 100)) for _ in range(40)]
    for gpu_count, batch_size in cases:
        given = f"a batch of {batch_size} on {gpu_count} GPUs"
        with for_input(given):
            yours: Any = answer(batch_size, gpu_count)
        expected = _sizes(batch_size, gpu_count)
        if isinstance(yours, tuple):
            yours = list(yours)
        hint = "A share is rounded up, and the last GPU gets what's left."
        if not (isinstance(yours, list) and all(type(size) is int for size in yours)):
            hint = "Return a list of ints, one for each GPU that gets samples."
            raise Wrong(yours=yours, expected=expected, given=given, hint=hint, values=True)
        if yours != expected:
            if sum(yours) != batch_size:
                hint = f"Your sizes add up to {sum(yours)}, but the batch has {batch_size}."
            elif 0 in yours:
                hint = "Leave out the GPUs that get no samples."
            elif yours[0] - min(yours) in (0, 1) and yours[-1] <= yours[0]:
                hint = "DataParallel doesn't even out the shares: all but the last are equal."
        expect_equal(yours, expected, given=given, hint=hint)
    gpu_count, batch_size = max(cases)
    return {
        "compared": f"{len(cases)} batches, each with PyTorch's own split",
        f"a batch of {batch_size}": f"{answer(batch_size, gpu_count)} on {gpu_count} GPUs",
    }


@exercise("4.2", "The smallest batch that feeds every GPU")
def batch_for_all(answer: Callable[[int, int], int]) -> dict[str, Any]:
    cases = [(random.randint(1, 120), random.randint(1, 12)) for _ in range(40)]
    for wanted, gpu_count in [(8, 8), (random.randint(1, 3), random.randint(5, 9)), *cases]:
        expected = max(wanted, gpu_count)
        while len(_sizes(expected, gpu_count)) < gpu_count:
            expected += 1
        given = f"at least {wanted} samples on {gpu_count} GPUs"
        with for_input(given):
            yours = answer(wanted, gpu_count)
        hint = "Return the batch size, an int."
        if isinstance(yours, int | float) and yours < wanted:
            hint = f"At least {wanted} samples are needed."
        elif type(yours) is int:
            working = len(_sizes(yours, gpu_count))
            if working < gpu_count:
                hint = f"A batch of {yours} feeds only {working} of {gpu_count} GPUs."
            elif yours > expected:
                hint = (
                    "All GPUs work, but a smaller batch would do. It doesn't have to be a multiple "
                    "of the number of GPUs."
                )
        expect_equal(yours, expected, given=given, hint=hint)
        if not isinstance(yours, int):
            hint = "The value is right, but return an int, since it counts samples."
            raise Wrong(yours=yours, expected=expected, given=given, hint=hint)
    return {
        "compared": f"{2 + len(cases)} pairs of sample and GPU counts",
        "17 or more on 8 GPUs": f"{answer(17, 8)}, divided into {_sizes(answer(17, 8), 8)}",
    }


@exercise("4.3", "Split along another dimension")
def other_dimension(
    answer: Callable[[nn.Module, list[torch.device]], nn.Module],
) -> dict[str, Any]:
    gpus = devices.lab(3)
    # Both sizes are divisible by three, so that a split along either dimension feeds all three GPUs.
    steps, batch = 3 * random.randint(2, 3), 3 * random.randint(2, 5)
    features = random.randint(2, 6)
    sequences = torch.randn(steps, batch, features)
    lstm = _RecordingLSTM(features, 4)
    expected = lstm(sequences)
    lstm.seen.clear()
    given = f"sequences of shape (T, B, F) = {tuple(sequences.shape)} on {len(gpus)} GPUs"
    with for_input(given):
        wrapped = answer(lstm, gpus)
        if not isinstance(wrapped, nn.Module):
            raise Wrong(yours=wrapped, expected="a module", hint="Return the wrapped model.")
        with for_input(given, _WRAPPED):
            yours = wrapped(sequences.to(gpus[0]))
        seen = sorted(lstm.seen, key=lambda note: str(note[0]))
        used = sorted({str(device) for device, _ in seen})
        if not seen:
            raise Wrong(
                yours="the lstm that was passed in never ran",
                expected="a module around that lstm",
                hint="Wrap the model that was passed in, not another one.",
            )
        if used != [str(gpu) for gpu in gpus]:
            more = "Without device_ids, DataParallel uses every GPU. "
            raise Wrong(
                yours=f"it ran on {', '.join(used)}",
                expected="it runs on " + ", ".join(map(str, gpus)),
                hint=(more if len(used) > len(gpus) else "")
                + "Use exactly the GPUs that were passed in: device_ids=gpus.",
            )
        whole = (steps, batch // len(gpus), features)
        hint = "Each replica must see all time steps of its sequences: split dimension 1, not 0."
        expect_equal([shape for _, shape in seen], [whole] * len(gpus), hint=hint)
        hint = "The output differs from what a single GPU computes."
        expect_close(yours.cpu(), expected, hint=hint, rtol=0, atol=_TF32)
    off = (yours.cpu() - expected).abs().max().item()
    return {
        "input": given,
        "each GPU saw": ", ".join(f"{shape} on {device}" for device, shape in seen),
        "largest difference from a single GPU": f"{off:.1e}",
    }


_TF32 = 0.01
"""On A100 and later, cuDNN may use TF32 (a 10-bit mantissa) in an LSTM. Its outputs are below 1."""

_WRAPPED = (
    "Wrapping worked, but the call failed. The model must be on the first of device_ids, and the "
    "batch dimension must be the one that's split."
)


class _RecordingLSTM(nn.LSTM):
    """An LSTM that returns only its output and records what each replica saw."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(features, hidden)
        self.seen: list[tuple[torch.device, tuple[int, ...]]] = []

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.seen.append((sequences.device, tuple(sequences.shape)))
        return super().forward(sequences)[0]
