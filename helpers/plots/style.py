"""The style of all figures: one palette, units on the axes, readable in light and dark themes."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation

# Okabe and Ito, "Color Universal Design", 2008: distinguishable with a color vision deficiency.
COLORS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "gray": "#999999",
}

SERIES = [COLORS[name] for name in ("blue", "orange", "green", "purple")]
RANK_COLORS = tuple(
    COLORS[name]
    # Light ones first, because the numbers drawn on them are black.
    for name in ("sky", "orange", "green", "vermilion", "purple", "yellow", "gray", "blue")
)

# An opaque light background keeps figures readable in light and dark notebooks.
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
    "axes.prop_cycle": plt.cycler(color=[c for n, c in COLORS.items() if n != "yellow"]),
}


def figure(
    rows: int = 1, columns: int = 1, *, width: float = 7.5, height: float = 3.2, **subplots: Any
) -> tuple[Figure, Any]:
    """Call ``plt.subplots`` with the course's style; width and height are in inches.

    Returns the figure and its axes: one Axes or an array of them, like ``plt.subplots``. Pass the
    figure to ``show``.
    """
    with plt.rc_context(_STYLE):
        fig, axes = plt.subplots(
            rows, columns, figsize=(width, height), layout="constrained", **subplots
        )
    return fig, axes


def title(axes: Axes, message: str, how: str) -> None:
    """Set a title that states the message, and below it, in gray, how the numbers were obtained.

    ``how`` is "measured", "counted" or "virtual time", plus what it was measured on.
    """
    axes.set_title(f"{message}\n", loc="left", fontweight="bold")
    above: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(how, (0, 1), (0, 4), color="#666666", fontsize=9, **above)


def headline(fig: Figure, message: str, how: str = "") -> None:
    """Set the title of a figure with multiple panels; the arguments are those of ``title``."""
    text = f"{message}\n" if how else message
    above = fig.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    look: Any = {"color": "#666666", "fontsize": 9, "va": "bottom"}
    fig.add_artist(Annotation(how, (0, 0), xycoords=above, **look))


def stacked_bars(
    axes: Axes,
    places: Sequence[Any],
    sizes: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    *,
    across: bool = False,
    width: float = 0.6,
) -> list[float]:
    """Draw a stacked bar at each of ``places``, with the parts in ``sizes``.

    ``sizes`` maps a part to its size at each place; ``across`` draws horizontal bars. Returns the
    bars' ends.
    """
    ends = [0.0] * len(places)
    draw: Any = axes.barh if across else axes.bar
    for name, each in sizes.items():
        draw(places, each, width, ends, color=colors[name], label=name)
        ends = [end + size for end, size in zip(ends, each, strict=True)]
    axes.grid(axis="y" if across else "x", visible=False)
    return ends


def log2_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick at each of ``values`` and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


def legend_beside(axes: Axes, **options: Any) -> None:
    """Put the legend to the right of the axes, where it doesn't hide anything."""
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), **{"fontsize": 8, **options})


def text_near(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    **options: Any,
) -> None:
    """Write ``text`` near a point; ``offset`` is in points, and ``options`` go to ``annotate``."""
    axes.annotate(text, point, offset, textcoords="offset points", **options)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = "#444444",
    **options: Any,
) -> None:
    """Draw an arrow between two points of the axes; ``options`` go to ``FancyArrowPatch``."""
    look: Any = {"arrowstyle": "-|>", "mutation_scale": 12, "zorder": 2, **options}
    axes.add_patch(FancyArrowPatch(start, end, color=color, **look))


def show(fig: Figure, alt: str) -> None:
    """Show a finished figure with its alternative text, and close it.

    ``alt`` tells a reader who can't see the figure what they should know, in one to three
    sentences: its kind, what it shows, and the numbers that matter.
    """
    wrong = f"alternative text must say what the figure shows, in a sentence; got {alt!r}"
    assert len(alt.split()) >= 5, wrong
    display(_Picture(fig, alt))
    plt.close(fig)


class _Picture:
    """A figure for notebooks, websites and screen readers.

    Neither JupyterLab nor nbconvert adds alternative text to a bare PNG, so the preferred format is
    HTML; PDF exports use the PNG, and a terminal prints the text.
    """

    def __init__(self, fig: Figure, alt: str) -> None:
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", bbox_inches="tight")
        self.png = base64.b64encode(buffer.getvalue()).decode()
        self.alt = " ".join(alt.split())

    def __repr__(self) -> str:
        return f"[Figure: {self.alt}]"

    def _repr_html_(self) -> str:
        alt = html.escape(self.alt, quote=True)
        return f'<img alt="{alt}" src="data:image/png;base64,{self.png}" style="max-width:100%">'

    def _repr_png_(self) -> str:
        return self.png
