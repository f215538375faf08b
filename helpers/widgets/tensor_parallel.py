"""Explorer for tensor parallelism: a split layer's virtual time by GPU count, link and width."""

from collections.abc import Callable
from functools import cache

import ipywidgets
from IPython.display import display

from helpers import plots
from helpers.plots.times import parts_of
from helpers.widgets.live import explorer, steps
from vgpu import Timeline
from vgpu.tables import Table
from vgpu.units import format_seconds

WIDTHS = (1024, 2048, 4096, 8192, 16384)
DEGREES = (1, 2, 4, 8, 16)
# The link inside a host, and how many GPUs of the group each host has, by name.
PLACES: dict[str, tuple[str, int]] = {
    "NVLink 4": ("NVLink 4", 8),
    "PCIe 5": ("PCIe 5", 8),
    "InfiniBand NDR, one GPU per host": ("NVLink 4", 1),
}

Layer = Callable[..., Timeline]
"""Called as ``layer(width, degree, hosts, link=name)``."""


def layer_on(layer: Layer, width: int, degree: int, place: str) -> Timeline:
    """Return the timeline of a layer on ``degree`` GPUs connected by ``place``, one of PLACES."""
    link, most_a_host = PLACES[place]
    return layer(width, degree, -(-degree // most_a_host), link=link)


def split_table(timelines: dict[str, Timeline]) -> Table:
    """Return a table of each timeline's time, share of collectives, and speedup over the first."""
    first = next(iter(timelines.values())).makespan_s
    rows = []
    for name, timeline in timelines.items():
        whole_s, sent_s = parts_of(timeline)
        gain = f"{first / whole_s:.2f} times as fast"
        rows.append((name, format_seconds(whole_s), f"{sent_s / whole_s:.0%}", gain))
    return Table(("4096 tokens", "layer", "collectives", "relative to one GPU"), rows)


def layer_explorer(layer: Layer) -> ipywidgets.Widget:
    """Return controls for ``layer``: the width, the number of GPUs, and their link."""
    remembered = cache(lambda *setting: layer_on(layer, *setting))

    def show(width: int, degree: int, place: str) -> None:
        if width // 128 < degree:
            print(f"Width {width} has {width // 128} heads of size 128, too few for {degree} GPUs.")
            return
        alone = remembered(width, 1, "NVLink 4")
        name = f"{degree} GPUs, {place}" if degree > 1 else "still 1 GPU"
        timelines = {"1 GPU": alone, name: remembered(width, degree, place)}
        plots.split_times(timelines, f"A layer of width {width}")
        display(split_table(timelines))

    place = ipywidgets.Dropdown(options=list(PLACES), description="link")
    return explorer(
        show,
        {
            "width": steps("width", WIDTHS, 8192),
            "degree": steps("GPUs", DEGREES, 8),
            "place": place,
        },
    )
