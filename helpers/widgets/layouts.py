"""Explorer for layouts of Llama 70B on 64 H100s: bytes by cause, a timeline and tokens/s.

PyTorch's own code runs one step of a model with only a few layers in that layout
(``vgpu.plan.extrapolate``), which takes a few seconds. The recording is cached, and replayed for
other networks.
"""

from functools import cache

import ipywidgets
from IPython.display import display

import vgpu
from helpers import plots
from helpers.widgets.live import explorer, steps
from vgpu.plan import RECOMPUTE, Layout, Plan, extrapolate
from vgpu.plan.recorded_step import ExtrapolatedStep
from vgpu.plan.transformer import LLAMA
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

GPUS, GPU, MODEL = 64, "H100", "70B"
TP, DP_REPLICATE, BATCHES = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)
FIRST = (8, 1, 8, "full")
"""The initial values of the controls."""
NETWORKS = ("InfiniBand NDR", "InfiniBand HDR", "InfiniBand EDR", "Ethernet 100")


def plan_of(tp: int, dp_replicate: int, batch: int, recompute: str) -> Plan:
    """Return a plan whose dp_shard follows from the number of GPUs.

    Raises ValueError if the sizes don't divide that number.
    """
    if GPUS % (tp * dp_replicate):
        raise ValueError(f"tp {tp} × dp_replicate {dp_replicate} does not divide {GPUS} GPUs")
    layout = Layout(dp_replicate, GPUS // (tp * dp_replicate), tp)
    return Plan(LLAMA[MODEL], layout, batch, recompute=recompute, gpu=GPU)


@cache
def answer(plan: Plan) -> ExtrapolatedStep:
    """Return the plan's extrapolated step; results are cached."""
    return extrapolate(plan)


def answer_table(found: ExtrapolatedStep, network: str) -> Table:
    """Return a table of speed, time by cause, and whether the plan fits."""
    room = found.plan.spec.memory_bytes
    allocated = sum(found.bytes_by_cause.values())
    seconds = found.seconds(network=network)
    speed = found.tokens_per_s(network=network)
    fits = "fits" if allocated <= 0.85 * room else "tight" if allocated <= room else "does not fit"
    return Table(
        (f"{found.plan.layout}, batch {found.plan.batch}", ""),
        [
            ("tokens/s per GPU", f"{speed:,.0f}"),
            ("one step", f"{format_seconds(seconds)}, {found.plan.tokens:,} tokens"),
            ("allocated", f"{format_bytes(allocated)} of {format_bytes(room)}: {fits}"),
        ],
        caption=f"Llama {MODEL} on {GPUS} {GPU}s, {network}; bytes are counted, times are virtual",
    )


def show_layout(
    tp: int, dp_replicate: int, batch: int, recompute: str, network: str = NETWORKS[0]
) -> None:
    """Draw bytes by cause and a step with a few layers, or say why the layout is impossible."""
    try:
        found = answer(plan_of(tp, dp_replicate, batch, recompute))
    except ValueError as problem:
        print(f"No such layout: {problem}.")
        return
    display(answer_table(found, network))
    plots.held_by_cause(
        {str(found.plan.layout): found.bytes_by_cause},
        capacity_bytes=found.plan.spec.memory_bytes,
        message="What one GPU holds",
        how="counted at the peak of a step; dashed: the GPU's memory",
        unit="GiB",
    )
    timeline = vgpu.replay(found.steps[0].timeline, network=network)
    layers = found.steps[0].plan.sizes.layers
    message = f"A step with {layers} of the {found.plan.sizes.layers} layers"
    plots.timeline(timeline, message, devices=timeline.devices[:1])


def layout_explorer() -> ipywidgets.Widget:
    """Return controls for the layout, batch, recomputation and network, and what they show."""
    tp, dp_replicate, batch, recompute = FIRST
    controls = {
        "tp": steps("tp", TP, tp),
        "dp_replicate": steps("dp_replicate", DP_REPLICATE, dp_replicate),
        "batch": steps("batch", BATCHES, batch),
        "recompute": ipywidgets.Dropdown(
            options=RECOMPUTE, value=recompute, description="recompute"
        ),
        "network": ipywidgets.Dropdown(options=NETWORKS, description="network"),
    }
    # Each of these 36 layouts is recorded, and replayed on both networks.
    few = {
        **{"tp": (1, 2, 8), "dp_replicate": (1, 2), "batch": (2, 8, 16)},
        **{"recompute": ("selective", "full"), "network": ("InfiniBand NDR", "Ethernet 100")},
    }
    return explorer(show_layout, controls, few)
