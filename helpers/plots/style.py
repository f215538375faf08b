"""The look that all figures share: one palette, units on the axes, readable on light and dark."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design", 2008: distinguishable with colour-blind eyes.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "grey": "#999999",
}

# An opaque light ground: the same figure is readable in a light and in a dark notebook.
_STYLE: Any = {
    "figure.facecolor": "#FFFFFF",
    "axes.facecolor": "#FFFFFF",
    "figure.dpi": 110,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "lines.linewidth": 2,
    "axes.prop_cycle": plt.cycler(color=[c for n, c in COLOURS.items() if n != "yellow"]),
}


def figure(
    rows: int = 1, columns: int = 1, *, width: float = 7.5, height: float = 3.2, **subplots: Any
) -> tuple[Figure, Any]:
    """``plt.subplots`` in the course's style; width and height in inches.

    Returns the figure and its axes: one Axes, or an array of them, as ``plt.subplots`` does. The
    caller shows the figure with ``plt.show()``; a figure is laid out without overlaps by itself.
    """
    with plt.rc_context(_STYLE):
        made, axes = plt.subplots(
            rows, columns, figsize=(width, height), layout="constrained", **subplots
        )
    return made, axes


def title(axes: Axes, message: str, how: str) -> None:
    """A title that states the message, and in grey how the numbers were got.

    ``how`` is "measured", "counted" or "virtual time", with what it was measured on.
    """
    axes.set_title(f"{message}\n", loc="left", fontweight="bold")
    axes.text(0, 1.02, how, transform=axes.transAxes, color="#666666", fontsize=9, va="bottom")


def headline(made: Figure, message: str, how: str) -> None:
    """As ``title``, over a figure of several panels."""
    made.suptitle(f"{message} · {how}", x=0.01, ha="left", fontsize=11, fontweight="bold")
