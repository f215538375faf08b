"""Six traces of training on four GPUs, each with a different fault, for lesson 16.

Each trace has three steps after a warm-up, with shapes only, in virtual time. Ranks that do the
same work are recorded only once.
"""

import base64
import functools
import gzip
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import vgpu

RANKS = 4
STEPS = 3
SLOW_RANK = 2
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"  # as PyTorch names it

Step = Callable[[], torch.Tensor]  # runs a training step and returns its loss
Prepare = Callable[[], Step]


class FaultyTrace(NamedTuple):
    fault: str
    timeline: vgpu.Timeline


@functools.cache
def traces() -> dict[str, FaultyTrace]:
    """The six traces, by letter."""
    return {
        "A": FaultyTrace("loader", data_parallel("A")),
        "B": FaultyTrace("straggler", straggler()),
        "C": FaultyTrace("launches", data_parallel("C")),
        "D": FaultyTrace("gather", data_parallel("D")),
        "E": FaultyTrace("bubble", pipeline()),
        "F": FaultyTrace("item", data_parallel("F")),
    }


_DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "A": {"loader_s": 15e-3},
    "C": {"width": 256, "blocks": 6, "rows": 512},
    "D": {"width": 4096, "rows": 256, "shard": True},
    "F": {"width": 512, "blocks": 8, "rows": 1024, "looks": True},
}


def data_parallel(letter: str, **changes: Any) -> vgpu.Timeline:
    """Record the run of trace A, C, D or F; ``changes`` override arguments of ``_trained``."""
    prepare = _trained(**{**_DATA_PARALLEL[letter], **changes})
    return _joined([_recorded(prepare)] * RANKS)


def write(folder: Path | str) -> dict[str, Path]:
    """Write each trace to a file in ``torch.profiler``'s format; return the paths by letter."""
    paths = {letter: Path(folder) / f"{letter}.json" for letter in traces()}
    for letter, trace in traces().items():
        trace.timeline.to_chrome_trace(paths[letter])
    return paths


def downloads(paths: dict[str, Path]) -> HTML:
    """Return download links for the files.

    Each link contains its compressed file, so it works wherever Jupyter runs.
    """
    links = []
    for path in paths.values():
        packed = base64.b64encode(gzip.compress(path.read_bytes())).decode()
        name = f"{path.name}.gz"
        href = f"data:application/gzip;base64,{packed}"
        links.append(f'<a download="{name}" href="{href}">{name}</a>')
    return HTML(
        f"<p>Traces, gzipped (Perfetto opens them without unpacking): {', '.join(links)}</p>"
    )


class _Look(nn.Module):
    """A module that reads a value from its input, as ``if hidden.isnan().any().item()`` would."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.detach().sum().to("cpu")  # with shapes only, item() has no value to return
        return hidden


def _block(width: int, looks: bool = False) -> nn.Sequential:
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    looking = [[layer, _Look()] if looks else [layer] for layer in layers]
    return nn.Sequential(*(module for each in looking for module in each))


def _trained(
    rows: int = 4096,
    width: int = 2048,
    blocks: int = 4,
    loader_s: float = 2e-5,
    shard: bool = False,
    looks: bool = False,
) -> Prepare:
    """Return a function that prepares data-parallel training of a few blocks in bfloat16."""

    def prepare() -> Step:
        with torch.device("vgpu"):
            net: nn.Module = nn.Sequential(*(_block(width, looks) for _ in range(blocks)))
        net = net.bfloat16()
        if shard:
            for block in net.children():
                fully_shard(block)
            fully_shard(net)
        else:
            net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        batch = torch.empty(rows, width, dtype=torch.bfloat16, device="vgpu")

        def step() -> torch.Tensor:
            vgpu.spend(loader_s, LOADER)
            loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return prepare


def _recorded(prepare: Prepare, rank: int = 0) -> vgpu.Timeline:
    with vgpu.cluster(hosts=1, gpus_per_host=RANKS, rank=rank), vgpu.shapes_only():
        step = prepare()
        for _ in range(2):  # the optimizer creates its state, then DDP rebuilds its buckets
            step()
        with vgpu.record() as timeline:
            for number in range(STEPS):
                with record_function(f"ProfilerStep#{number}"):
                    step()
            torch.accelerator.synchronize()
    return timeline


def straggler(rows: int = 6144) -> vgpu.Timeline:
    """Record four ranks; one of them gets ``rows`` rows, the others 4,096 each."""
    usual, slow = _recorded(_trained()), _recorded(_trained(rows=rows))
    return _joined(slow if rank == SLOW_RANK else usual for rank in range(RANKS))


def _joined(timelines: Iterable[vgpu.Timeline]) -> vgpu.Timeline:
    """Join one recording per rank, in order, whichever rank it was recorded as."""
    return vgpu.joined(
        [
            replace(timeline, programs=tuple(replace(p, rank=rank) for p in timeline.programs))
            for rank, timeline in enumerate(timelines)
        ]
    )


def pipeline(micro_batches: int = 5) -> vgpu.Timeline:
    """Record GPipe with four stages of one block each."""
    return vgpu.joined(
        [_recorded(functools.partial(_stage, r, micro_batches), r) for r in range(RANKS)]
    )


def _stage(rank: int, micro_batches: int) -> Step:
    rows = width = 2048
    with torch.device("vgpu"):
        stage = _block(width).bfloat16()
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)

    def received(source: int) -> torch.Tensor:
        tensor = torch.empty(rows, width, dtype=torch.bfloat16, device="vgpu")
        dist.recv(tensor, source)
        return tensor

    def step() -> torch.Tensor:
        passed = []
        for _ in range(micro_batches):
            is_first = rank == 0
            given = torch.empty(rows, width, dtype=torch.bfloat16, device="vgpu")
            given = (given if is_first else received(rank - 1)).requires_grad_()
            output = stage(given)
            passed.append((given, output))
            if rank < RANKS - 1:
                dist.isend(output.detach(), rank + 1)
        for given, output in passed:
            gradient = output.detach() if rank == RANKS - 1 else received(rank + 1)
            output.backward(gradient)
            if rank > 0:
                assert given.grad is not None
                dist.isend(given.grad, rank - 1)
        optimizer.step()
        optimizer.zero_grad()
        return output

    return step
