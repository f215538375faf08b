"""Explorer for pipelines: timeline, bubble and memory, by stages, micro-batches and schedule.

Times are in units, or in virtual time on a chosen GPU. In the latter case, one layer of a
transformer is recorded on one GPU, with shapes only, and the schedule is simulated with its cost.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ipywidgets
import torch
from IPython.display import display
from torch import nn

import vgpu
from helpers import plots
from helpers.widgets.live import explorer, steps
from vgpu.plan.schedules import KINDS, SimulatedSchedule, Times, peaks_in_flight, simulate
from vgpu.profiling.memory import ACTIVATIONS
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

# The network and batch for virtual time: float16, with 9 billion parameters, more than an H100 can
# train.
LAYERS, WIDTH, HEADS, TOKENS, BATCH = 32, 4864, 38, 512, 64

# Mixed precision with Adam: weight and gradient in float16; weight, momentum and variance in
# float32 (Rajbhandari et al., 2020, "ZeRO", 3.1).
BYTES_PER_PARAMETER = {"parameters": 2, "gradients": 2, "optimizer state": 4 + 4 + 4}

_UNITS = "units of time"


@dataclass(frozen=True)
class LayerCost:
    """One layer of the transformer, for one micro-batch, on one GPU: virtual time and bytes.

    ``forward_s`` and ``backward_s`` include kernel launches, since each GPU has its own process.
    Forward saves ``activation_bytes`` for backward; sending its output takes ``transfer_s``.
    """

    forward_s: float
    backward_s: float
    transfer_s: float
    activation_bytes: int
    parameters: int


@dataclass(frozen=True)
class Answer:
    """The result for one choice of stages, micro-batches, schedule and GPU, per device."""

    simulated: SimulatedSchedule
    in_flight: list[int]
    cost: LayerCost | None
    gpu: str | None

    @property
    def layers(self) -> int:
        """The number of layers on each device."""
        return LAYERS // self.simulated.schedule.devices

    @property
    def alone(self) -> float:
        """The time that one device takes to do all the work."""
        row = self.simulated.boxes[0]
        return self.simulated.schedule.devices * sum(box.end - box.start for box in row)

    def bytes_by_cause(self) -> list[dict[str, int]]:
        """Return the bytes by cause on each device, at its peak."""
        assert self.cost is not None
        parameters = self.layers * self.cost.parameters
        chunk = self.layers * self.cost.activation_bytes // self.simulated.schedule.chunks
        held = {name: size * parameters for name, size in BYTES_PER_PARAMETER.items()}
        return [{**held, ACTIVATIONS: count * chunk} for count in self.in_flight]

    def peak_bytes(self) -> list[int]:
        """Return the bytes of parameters, gradients, optimizer state and activations per device."""
        return [sum(causes.values()) for causes in self.bytes_by_cause()]


def answer(kind: str, devices: int, micro_batches: int, gpu: str | None = None) -> Answer:
    """Simulate the schedule ``kind`` from ``schedules.KINDS``, in units of time or on a named GPU.

    In units, forward takes 1 on each device and backward 2. Raises ValueError if the schedule
    doesn't support these counts.
    """
    schedule = KINDS[kind](devices, micro_batches)
    if gpu is None:
        return Answer(simulate(schedule), peaks_in_flight(schedule), None, None)
    if BATCH % micro_batches or LAYERS % schedule.stages:
        raise ValueError(
            f"{BATCH} sequences don't divide evenly into {micro_batches} micro-batches, or "
            f"{LAYERS} layers into {schedule.stages} stages"
        )
    cost = layer_cost(gpu, BATCH // micro_batches)
    layers = LAYERS // devices
    half_s = layers * cost.backward_s / 2
    times = Times(layers * cost.forward_s, half_s, half_s, cost.transfer_s)
    return Answer(simulate(schedule, times), peaks_in_flight(schedule), cost, gpu)


@cache
def layer_cost(gpu: str, sequences: int) -> LayerCost:
    """Record one transformer layer, forward and backward, in virtual time on the named GPU."""
    # Only one layer is recorded, so the full network doesn't have to fit.
    with vgpu.enable(1, gpu=gpu, memory_bytes=2**50) as lab, vgpu.shapes_only():
        (device,) = lab.devices
        here: dict[str, Any] = {"device": device, "dtype": torch.float16}
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, **here
        )
        x = torch.randn(sequences, TOKENS, WIDTH, **here).requires_grad_()  # (B, T, D)
        memory_allocated = torch.get_device_module(device).memory_allocated
        before_bytes = memory_allocated(device)
        with vgpu.record() as forward:
            output = layer(x)
        kept_bytes = memory_allocated(device) - before_bytes
        gradient = torch.empty_like(output)
        with vgpu.record() as backward:
            torch.autograd.backward(output, gradient)
        costs = vgpu.CostModel(vgpu.PRESETS[gpu])
        return LayerCost(
            forward.makespan_s,
            backward.makespan_s,
            costs.copy_time_s(output.nbytes),
            kept_bytes,
            sum(parameter.numel() for parameter in layer.parameters()),
        )


def answer_table(result: Answer) -> Table:
    """Return a table of time, speedup, bubble and memory."""
    simulated = result.simulated
    count = simulated.schedule.devices
    speed_up = f"{result.alone / simulated.makespan:.2f} times as fast as one device"
    bubble = ("bubble", f"{simulated.bubble:.1%}", "of all devices' time")
    if result.cost is None or result.gpu is None:
        chunks = simulated.schedule.chunks
        unit = "micro-batches per device"
        if chunks > 1:
            unit += f", each for 1 of {chunks} chunks"
        most = ", ".join(map(str, result.in_flight))
        return Table(
            (simulated.schedule.name, "", ""),
            [
                ("one step", f"{simulated.makespan:g} units", speed_up),
                bubble,
                ("activations in flight", most, unit),
            ],
        )
    peaks, room = result.peak_bytes(), vgpu.PRESETS[result.gpu].memory_bytes
    fits = sum(peak <= room for peak in peaks)
    room_told = f"of {format_bytes(room)}; fits on {fits} of {count}"
    return Table(
        (f"{simulated.schedule.name} on {count} × {result.gpu}", "", ""),
        [
            ("one step", format_seconds(simulated.makespan), f"virtual time; {speed_up}"),
            bubble,
            ("fullest device", format_bytes(max(peaks)), room_told),
            ("emptiest device", format_bytes(min(peaks)), "counted"),
        ],
    )


def show_answer(kind: str, devices: int, micro_batches: int, gpu: str | None = None) -> None:
    """Draw the schedule and list its cost, or say why it's impossible."""
    try:
        result = answer(kind, devices, micro_batches, gpu)
    except ValueError as problem:
        print(f"No such schedule: {problem}.")
        return
    if gpu is None:
        plots.schedule(result.simulated)
    else:
        how = f"simulated, with one layer's virtual time on one {gpu}"
        plots.schedule(result.simulated, how=how, unit="ms", factor=1e3)
    display(answer_table(result))


def pipeline_explorer() -> ipywidgets.Widget:
    """Return controls for stages, micro-batches, schedule and GPU, and ``show_answer``'s output."""
    controls = {
        "kind": ipywidgets.Dropdown(options=list(KINDS), value="1F1B", description="schedule"),
        "gpu": ipywidgets.Dropdown(
            options=[(_UNITS, None), *((name, name) for name in vgpu.PRESETS)], description="GPU"
        ),
        "devices": steps("stages", [1, 2, 4, 8], 4),
        "micro_batches": steps("micro-batches", [1, 2, 4, 8, 16, 32, 64], 8),
    }
    few = {"gpu": (None, "H100"), "devices": (2, 4, 8), "micro_batches": (4, 8, 16, 32)}
    return explorer(show_answer, controls, few, per_row=2)
