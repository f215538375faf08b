"""Explorer for activation checkpointing: measured bytes and recomputation by depth and segments."""

from collections import Counter
from dataclasses import dataclass

import ipywidgets
import torch
from IPython.display import display
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from helpers import plots
from helpers.widgets.live import explorer
from vgpu.profiling.memory import StepRecord
from vgpu.tables import Table
from vgpu.units import format_bytes

_BATCH, _WIDTH = 2048, 16


@dataclass(frozen=True)
class Run:
    """One step of ``depth`` layers in ``segments``: its record, and each layer's forward calls."""

    depth: int
    segments: int
    record: StepRecord
    calls: list[int]

    @property
    def recomputed(self) -> int:
        """The forward calls beyond the first for each layer."""
        return sum(self.calls) - self.depth


def run_step(depth: int, segments: int, gpu: torch.device) -> Run:
    """Run a training step of ``depth`` identical layers, Linear and Tanh, on ``gpu``.

    ``checkpoint_sequential`` runs them in ``segments``; with 1, there's no activation
    checkpointing. Raises ValueError unless there are 1 to ``depth`` segments.
    """
    if not 1 <= segments <= depth:
        raise ValueError(f"{depth} layers can be split into 1 to {depth} segments, got {segments}")
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(depth)]
    model = nn.Sequential(*layers).to(gpu)
    x = torch.randn(_BATCH, _WIDTH, device=gpu)
    calls: Counter[int] = Counter()
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    with StepRecord(model, inputs=[x]) as record:
        loss = checkpoint_sequential(model, segments, x, use_reentrant=False).sum()
        record.phase("backward")
        loss.backward()
    return Run(depth, segments, record, [calls[index] for index in range(depth)])


def run_table(plain: Run, run: Run) -> Table:
    """Return a table of peaks and forward calls, without and with activation checkpointing."""
    saved = 1 - run.record.peak.total_bytes / plain.record.peak.total_bytes
    rows = [
        ("no recomputation", format_bytes(plain.record.peak.total_bytes), "", sum(plain.calls)),
        (
            f"{run.segments} segment{'s' if run.segments > 1 else ''}",
            format_bytes(run.record.peak.total_bytes),
            f"{saved:.0%}",
            f"{sum(run.calls)}, {run.recomputed} of them recomputed",
        ),
    ]
    return Table((f"{run.depth} layers", "peak", "saved", "layers' forward calls"), rows)


def show_run(depth: int, segments: int, gpu: torch.device) -> None:
    """Run a step without and with activation checkpointing; show the bytes of both."""
    plain, run = run_step(depth, 1, gpu), run_step(depth, segments, gpu)
    name = f"{segments} segment{'s' if segments > 1 else ''}"
    plots.steps_by_cause({"no recomputation": plain.record, name: run.record})
    display(run_table(plain, run))


def checkpointing_explorer(gpu: torch.device) -> ipywidgets.Widget:
    """Return sliders for depth and segments; there are never more segments than layers."""
    depth = ipywidgets.IntSlider(16, min=2, max=36, description="layers", continuous_update=False)
    segments = ipywidgets.IntSlider(
        4, min=1, max=16, description="segments", continuous_update=False
    )
    depth.observe(lambda change: setattr(segments, "max", change["new"]), "value")
    return explorer(
        lambda depth, segments: show_run(depth, min(depth, segments), gpu),
        {"depth": depth, "segments": segments},
        {"depth": (16, 25, 36), "segments": (1, 2, 4, 5, 6, 8, 13, 16)},
    )
