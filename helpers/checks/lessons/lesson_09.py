"""Checks for lesson 09: a pipeline in one loop, split sizes, and a stream that doesn't wait."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import vgpu
from helpers.checks.core import (
    Wrong,
    exercise,
    expect_close,
    expect_equal,
    expect_gradients,
    expect_graph,
    expect_tensor,
    expect_whole_number,
    for_input,
)
from vgpu import Timeline
from vgpu.units import format_seconds

_MOST_RECORDINGS = 12


def _stages(width: int, gpus: Sequence[torch.device]) -> list[nn.Module]:
    """Return a stage on each GPU: a linear layer and a tanh."""
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(gpu) for gpu in gpus]


def _ours(
    stages: Sequence[nn.Module], gpus: Sequence[torch.device], size: int, batch: torch.Tensor
) -> torch.Tensor:
    """Run the solution's loop."""
    outputs = []
    for hidden in batch.split(size):
        for stage, gpu in zip(stages, gpus, strict=True):
            hidden = stage(hidden.to(gpu))
        outputs.append(hidden)
    return torch.cat(outputs)


@exercise("9.1", "A pipeline in one loop")
def pipelined(answer: Callable[..., torch.Tensor]) -> dict[str, str]:
    for count in (2, 3):
        size, width = random.randint(3, 6), random.randint(3, 6)
        # The last piece is smaller. The number of pieces isn't ``size``: chunk(size) would be wrong.
        whole = random.choice([number for number in (2, 3, 4) if number != size - 1])
        rows = size * whole + random.randint(1, size - 1)
        given = f"{rows} samples in pieces of {size}, {count} stages"
        hint = (
            "Move each piece to the stage's GPU, then call the stage; join the outputs at the end."
        )
        with vgpu.enable(count) as lab, for_input(given, hint):
            stages, batch = _stages(width, lab.devices), torch.randn(rows, width)
            _judge_loop(answer, stages, lab.devices, size, batch)
    return _judge_overlap(answer)


def _judge_loop(
    answer: Callable[..., torch.Tensor],
    stages: list[nn.Module],
    gpus: list[torch.device],
    size: int,
    batch: torch.Tensor,
) -> None:
    """Raise Wrong unless every stage sees every piece once, and the last GPU has the result.

    Outputs and gradients must match our loop's.
    """
    seen: list[list[int]] = [[] for _ in stages]
    hooks = [
        stage.register_forward_pre_hook(lambda _, inputs, i=i: seen[i].append(len(inputs[0])))
        for i, stage in enumerate(stages)
    ]
    yours = answer(list(stages), list(gpus), size, batch.clone())
    for hook in hooks:
        hook.remove()
    pieces = [len(piece) for piece in batch.split(size)]
    for stage, sizes in enumerate(seen):
        if sorted(sizes) != sorted(pieces):
            raise Wrong(
                yours=f"stage {stage} was called with {sizes} samples",
                expected=f"called with {pieces} samples",
                hint="Every stage sees every piece once; batch.split(split_size) makes them.",
            )
    expect_tensor(yours, hint="Join the outputs of the pieces: torch.cat(outputs).")
    expect_equal(yours.device, gpus[-1], hint="The outputs stay on the last GPU.")
    mine, ours = nn.Sequential(*stages), copy.deepcopy(nn.Sequential(*stages))
    expected = _ours(list(ours), gpus, size, batch)
    expected.sum().backward()
    hint = "The outputs are wrong: are they in the batch's order?"
    expect_close(yours.detach().cpu(), expected.detach().cpu(), hint=hint)
    hint = "detach(), no_grad() and .data cut the graph; .to() doesn't."
    expect_graph(yours, "an output", hint)
    yours.sum().backward()
    expect_gradients(mine.parameters(), ours.parameters())


def _judge_overlap(answer: Callable[..., torch.Tensor]) -> dict[str, str]:
    """Compare the virtual time on two K80s with our loop's."""
    rows, size = 4096, 512
    given = f"{rows:,} samples in pieces of {size}, two K80s"
    waiting = "Python waits in the loop: don't read any value there."
    times_s: dict[str, float] = {}
    waits = 0
    with vgpu.enable(2, gpu="K80") as lab, vgpu.shapes_only():
        stages = _stages(4096, lab.devices)
        batch = torch.randn(rows, 4096, device=lab.devices[0])
        for name, loop, piece in (
            ("the whole batch", _ours, rows),
            ("ours", _ours, size),
            ("yours", answer, size),
        ):
            with vgpu.record() as timeline:
                try:
                    output = loop(list(stages), list(lab.devices), piece, batch)
                except vgpu.NoValueError as error:
                    raise Wrong(
                        yours="a loop that reads a value of a tensor on a GPU",
                        expected="a loop that launches all pieces and doesn't wait",
                        given=given,
                        hint=waiting,
                    ) from error
                output.sum().backward()
            times_s[name] = timeline.makespan_s
            waits = sum(event.kind == "wait" for event in timeline.events)
    most_s = 1.05 * times_s["ours"]
    if times_s["yours"] > most_s:
        raise Wrong(
            yours=format_seconds(times_s["yours"]),
            expected=f"at most {format_seconds(most_s)}, in virtual time",
            given=given,
            hint=waiting
            if waits
            else "A piece's copy to the next GPU is queued behind the next pieces' work. Take "
            "each piece through all stages, then start the next.",
        )
    return {
        "your virtual time": format_seconds(times_s["yours"]),
        "budget": format_seconds(most_s),
        "the whole batch at once": format_seconds(times_s["the whole batch"]),
    }


class Machine(NamedTuple):
    """Two linked GPUs, the width of a network of four linear layers, and a batch size."""

    gpu: str
    link: str
    width: int
    batch_size: int


def _seconds(machine: Machine, split_size: int) -> float:
    """Return the virtual time for one batch in pieces, forward and backward."""
    with vgpu.enable(2, gpu=machine.gpu, link=machine.link) as lab, vgpu.shapes_only():
        first, second = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(gpu)
            for width, gpu in zip((machine.width, machine.width), lab.devices, strict=True)
        )
        batch = torch.randn(machine.batch_size, 64, machine.width, device=lab.devices[0])
        with vgpu.record() as timeline:
            pieces = [second(first(p).to(lab.devices[1])) for p in batch.split(split_size)]
            torch.cat(pieces).sum().backward()
    return timeline.makespan_s


def _machines() -> list[Machine]:
    """Return machines whose best sizes are so far apart that no single size is good on all of them.

    With a power of two as the number of pieces, the time is at most 4.6% above the best on each of
    them. On V100s with a smaller batch, it can be 5.7% above the best.
    """
    return [
        Machine("K80", "PCIe 3", random.choice((2048, 3072)), random.randint(90, 120)),
        Machine("H100", "NVLink 4", random.choice((128, 256)), random.randint(90, 120)),
        Machine("V100", "NVLink 2", random.choice((512, 768, 1024)), random.randint(97, 120)),
    ]


def _stopwatch(machine: Machine) -> tuple[Callable[[int], float], list[int], dict[int, float]]:
    """Return a machine's ``time_of``, the sizes it was called with, and the time for each size."""
    asked: list[int] = []
    times_s: dict[int, float] = {}

    def time_of(size: int) -> float:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a split size must be an integer of at least 1, got {size!r}")
        asked.append(size)
        if size not in times_s:
            times_s[size] = _seconds(machine, size)
        return times_s[size]

    return time_of, asked, times_s


@exercise("9.2", "The best split size for another GPU")
def best_split_size(answer: Callable[[Callable[[int], float], int], int]) -> dict[str, str]:
    answer(lambda size: float(size), 4)  # an untouched stub raises here
    shown = {}
    for machine in _machines():
        batch_size = machine.batch_size
        time_of, asked, times_s = _stopwatch(machine)
        given = f"a batch of {batch_size} on two {machine.gpu}s"
        with for_input(
            given, "Call time_of with split sizes, which are integers, and return one of them."
        ):
            yours = answer(time_of, batch_size)
            expect_whole_number(yours, 1, batch_size, hint="Return the size, not its time.")
            if len(asked) > _MOST_RECORDINGS:
                raise Wrong(
                    yours=f"{len(asked)} recordings",
                    expected=f"at most {_MOST_RECORDINGS}",
                    hint="The curve is flat near its minimum: try sizes that differ by a factor "
                    "of 2.",
                )
            asked_then = list(asked)
            # For each number of pieces, try the smallest size that needs no more pieces.
            for count in range(1, batch_size + 1):
                time_of(-(-batch_size // count))
            time_of(yours)
            best = min(times_s, key=lambda size: times_s[size])
            if times_s[yours] > 1.05 * times_s[best]:
                raise Wrong(
                    yours=f"pieces of {yours}: {format_seconds(times_s[yours])}",
                    expected=f"at most {format_seconds(1.05 * times_s[best])}; "
                    f"pieces of {best} take {format_seconds(times_s[best])}",
                    hint="The best size depends on the GPU, the link and the network: call time_of "
                    "for several sizes, including very small pieces and the whole batch.",
                )
        shown[given] = (
            f"pieces of {yours}: {format_seconds(times_s[yours])}, after {len(set(asked_then))} "
            f"recordings; pieces of {best}: {format_seconds(times_s[best])}, the best; "
            f"the whole batch: {format_seconds(times_s[batch_size])}"
        )
    return shown


def _products(batches: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the solution's products: two buffers, two waits."""
    gpu = weight.device
    default, side = torch.accelerator.current_stream(gpu), torch.Stream(gpu)
    buffers = [torch.empty_like(batches[0], device=gpu) for _ in range(2)]
    side.wait_stream(default)
    with side:
        buffers[0].copy_(batches[0], non_blocking=True)
    products = []
    for index in range(len(batches)):
        default.wait_stream(side)
        if index + 1 < len(batches):
            side.wait_stream(default)
            with side:
                buffers[(index + 1) % 2].copy_(batches[index + 1], non_blocking=True)
        products.append(buffers[index % 2] @ weight)
    return products


def _use_memory(rows: int, weight: torch.Tensor) -> None:
    """Free the memory of two tensors that the default stream is still reading."""
    for part in [torch.zeros(rows, len(weight), device=weight.device) for _ in range(2)]:
        part.sum()


@exercise("9.3", "Find the missing synchronization")
def repaired(
    answer: Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]],
) -> dict[str, str]:
    shown = {}
    for _ in range(2):
        count, rows = random.randint(4, 7), random.choice((384, 512, 640))
        batches = [torch.randn(rows, 256) for _ in range(count)]
        weight = torch.randn(256, 1024)
        expected = [batch @ weight for batch in batches]
        with vgpu.enable(1, gpu="K80") as lab:
            pinned = [batch.pin_memory() for batch in batches]
            there = weight.to(lab.devices[0])
            with vgpu.record() as ours:
                _use_memory(rows, there)
                _products(pinned, there)
            given = f"{count} batches of {rows} x 256"
            hint = "Start from `racing`, and return the list of products."
            with for_input(given, hint):
                with vgpu.record() as timeline:
                    _use_memory(rows, there)
                    products = answer(pinned, there)
                _judge_products(products, expected, timeline)
                if timeline.makespan_s > 1.1 * ours.makespan_s:
                    raise Wrong(
                        yours=f"no race, {format_seconds(timeline.makespan_s)}",
                        expected=f"at most {format_seconds(1.1 * ours.makespan_s)}",
                        hint="Right, but copies and matmuls take turns. Wait as early in the "
                        "loop and for as little as possible; Python itself shouldn't wait at all.",
                    )
            with vgpu.record() as in_turn:
                _use_memory(rows, there)
                for batch in pinned:
                    batch.to(there.device, non_blocking=True) @ there
            shown[given] = (
                f"no race, {format_seconds(timeline.makespan_s)}; budget: "
                f"{format_seconds(1.1 * ours.makespan_s)}; on one stream: "
                f"{format_seconds(in_turn.makespan_s)}"
            )
    return shown


def _judge_products(products: Any, expected: list[torch.Tensor], timeline: Timeline) -> None:
    if not isinstance(products, list) or not all(isinstance(p, torch.Tensor) for p in products):
        hint = "Return the list of products."
        raise Wrong(yours=repr(products), expected="a list of tensors", hint=hint)
    if timeline.races:
        race = timeline.races[0]
        if isinstance(race, vgpu.FreedInUse):
            hint = (
                "A batch's memory is reused while its matmul may still be reading it. Keep the two "
                "buffers, or call record_stream."
            )
        elif race.other_operation not in ("mm", "copy", "copy_"):
            hint = (
                "Something on the default stream may still be reading the buffers' memory: "
                "make the first copy wait for it, as in `racing`."
            )
        elif race.operation in ("copy", "copy_"):
            hint = "A copy writes to a buffer that a matmul may still be reading."
        else:
            hint = "A matmul reads a buffer before its copy has arrived."
        count = len(timeline.races)
        yours = f"{count} {'race' if count == 1 else 'races'}; {race}"
        raise Wrong(yours=yours, expected="no race", hint=hint)
    expect_equal(len(products), len(expected), hint="Return one product for each batch.")
    for yours, right in zip(products, expected, strict=True):
        hint = "The products are wrong, although there's no race: does each matmul read the right buffer?"
        expect_close(yours.cpu(), right, hint=hint, rtol=1e-3, atol=1e-3)
