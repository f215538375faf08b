"""Llama 70B on 64 H100s: a layout to bytes by cause, a timeline and tokens/s, by PyTorch's own code.

The layout's step is recorded with few layers (``vgpu.plan.few_layers``), which takes some seconds,
and kept: another network plays the same recording again. While somebody looks at the explorer, what
one of its controls can reach is recorded by a process beside this one (``vgpu.plan.ready``).
"""

import itertools
from functools import cache

import ipywidgets
from IPython.display import display

import vgpu
from helpers import plots
from helpers.widgets.live import live, when_idle
from vgpu.plan import CHECKPOINTS, Plan
from vgpu.plan.few_layers import FewLayers, in_few_layers
from vgpu.plan.parallel import Layout
from vgpu.plan.ready import Ready
from vgpu.plan.transformer import LLAMA
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

GPUS, GPU, MODEL = 64, "H100", "70B"
TENSORS, REPLICAS, BATCHES = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)
FIRST = (8, 1, 8, "full")
"""What the controls say at first."""
NETWORKS = ("InfiniBand NDR", "InfiniBand HDR", "InfiniBand EDR", "Ethernet 100")


def plan_of(tensors: int, replicas: int, batch: int, checkpoint: str) -> Plan:
    """What is left of the GPUs are shards; ValueError where they do not come out even."""
    if GPUS % (tensors * replicas):
        raise ValueError(f"{tensors} tensors × {replicas} replicas do not divide {GPUS} GPUs")
    layout = Layout(replicas, GPUS // (tensors * replicas), tensors)
    return Plan(LLAMA[MODEL], layout, batch, checkpoint=checkpoint, gpu=GPU)


@cache
def answer(plan: Plan) -> FewLayers:
    """The plan's step, recorded once: here, or beside once the explorer is there."""
    if _beside is not None and _beside.takes(plan):
        return _beside.answer(plan)
    return in_few_layers(plan)


_beside: Ready | None = None


def _answer_beside() -> Ready:
    """From now on a process beside this one answers; one for all explorers."""
    global _beside
    if _beside is None:
        every = itertools.starmap(
            plan_of, itertools.product(TENSORS, REPLICAS, BATCHES, CHECKPOINTS)
        )
        _beside = Ready(plan_of(*FIRST), list(every))
    return _beside


def answer_table(found: FewLayers, network: str) -> Table:
    """Speed, time by cause, and whether it fits."""
    room = found.plan.spec.memory_bytes
    allocated = sum(found.bytes_by_cause.values())
    seconds = found.seconds(network=network)
    speed = found.tokens_per_s(network=network)
    fits = "fits" if allocated <= 0.85 * room else "tight" if allocated <= room else "does not fit"
    return Table(
        (f"{found.plan.layout}, batch {found.plan.batch}", ""),
        [
            ("tokens/s a GPU", f"{speed:,.0f}"),
            ("a step", f"{format_seconds(seconds)}, {found.plan.tokens:,} tokens"),
            ("allocated", f"{format_bytes(allocated)} of {format_bytes(room)}: {fits}"),
        ],
        caption=f"Llama {MODEL} on {GPUS} {GPU}s, {network}; counted, and in virtual time",
    )


def show_layout(
    tensors: int, replicas: int, batch: int, checkpoint: str, network: str = NETWORKS[0]
) -> None:
    """Draw bytes by cause and the step of four layers; say why where there is no such layout."""
    try:
        found = answer(plan_of(tensors, replicas, batch, checkpoint))
    except ValueError as problem:
        print(f"No such layout: {problem}.")
        return
    display(answer_table(found, network))
    plots.held_by_cause(
        {str(found.plan.layout): found.bytes_by_cause},
        capacity_bytes=found.plan.spec.memory_bytes,
        message="What one GPU holds",
        how="counted at the peak of a step; dashed: its memory",
        unit="GiB",
    )
    played = vgpu.replay(found.steps[0].timeline, network=network)
    layers = found.steps[0].plan.sizes.layers
    plots.timeline(played, f"A step with {layers} of the layers", devices=played.devices[:1])


def layout_explorer() -> ipywidgets.Widget:
    """Tensors, replicas, batch, checkpoints and network around ``show_layout``."""

    def slider(name: str, values: tuple[int, ...], value: int) -> ipywidgets.Widget:
        return ipywidgets.SelectionSlider(
            options=values, value=value, description=name, continuous_update=False
        )

    tensors, replicas, batch, checkpoint = FIRST
    controls: dict[str, ipywidgets.Widget] = {
        "tensors": slider("tensors", TENSORS, tensors),
        "replicas": slider("replicas", REPLICAS, replicas),
        "batch": slider("batch", BATCHES, batch),
        "checkpoint": ipywidgets.Dropdown(
            options=CHECKPOINTS, value=checkpoint, description="checkpoints"
        ),
        "network": ipywidgets.Dropdown(options=NETWORKS, description="network"),
    }
    # Each of these 36 layouts is recorded, and played on both networks.
    few = {
        **{"tensors": (1, 2, 8), "replicas": (1, 2), "batch": (2, 8, 16)},
        **{"checkpoint": ("selective", "full"), "network": ("InfiniBand NDR", "Ethernet 100")},
    }
    drawn = live(show_layout, controls, few)
    when_idle(_answer_beside().begin)
    numbers = [controls[name] for name in ("tensors", "replicas", "batch")]
    others = [controls[name] for name in ("checkpoint", "network")]
    return ipywidgets.VBox([ipywidgets.HBox(numbers), ipywidgets.HBox(others), drawn])
