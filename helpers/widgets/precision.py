"""Explorer for float8: which values survive the cast, by format, scale and outliers."""

from dataclasses import dataclass
from typing import Any

import ipywidgets
import torch
from IPython.display import display

from helpers import plots
from helpers.widgets.live import explorer, steps
from vgpu.tables import Table

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = ("tensor", "row", "block of 32", "MXFP8 block")  # the last one's scales are powers of 2
LARGER = ("one value", "one channel", "one token")
TIMES = (1, 100, 10_000, 100_000, 1_000_000)
TOKENS, WIDTH = 256, 512


@dataclass(frozen=True)
class Answer:
    """The scaled values without outliers, their relative error, and the share that becomes 0."""

    scaled: torch.Tensor
    error: float
    zero: float


def answer(format_name: str, per: str, larger: str, times: float) -> Answer:
    """Cast normally distributed values (256 tokens, 512 channels) with outliers to float8.

    ``per`` is the granularity of the scales, one of SCALES. ``larger``, one of LARGER, selects the
    outliers, which are multiplied by ``times``.
    """
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    token, channel = divmod(int(x.abs().argmax()), WIDTH)
    parts: dict[str, Any] = {
        "one value": (token, channel),
        "one channel": (slice(None), channel),
        "one token": token,
    }
    part = parts[larger]
    others = torch.ones_like(x, dtype=torch.bool)
    x[part] *= times
    others[part] = False
    groups = x.unflatten(-1, (-1, 32)) if "block" in per else x
    largest = groups.abs().amax() if per == "tensor" else groups.abs().amax(-1, keepdim=True)
    dtype = FORMATS[format_name]
    scale = torch.finfo(dtype).max / largest
    if "MXFP8" in per:
        scale = scale.log2().floor().exp2()
    scale = scale.expand_as(groups).reshape(x.shape)
    scaled = (x * scale)[others]
    kept = scaled.to(dtype).float()
    off = (kept - scaled) / scale[others]
    error = off.norm() / x[others].norm()
    return Answer(scaled, error.item(), (kept == 0).float().mean().item())


def show_answer(format_name: str, per: str, larger: str, times: float) -> None:
    """Draw the values other than outliers in the format's range; list what each scale loses."""
    found = {each: answer(format_name, each, larger, times) for each in SCALES}
    message = f"{format_name}, a scale per {per}; {larger} {times:,} times as large"
    how = "measured; the scale brings the largest value to the right end"
    plots.scaled_numbers(
        {"the other values": found[per].scaled}, FORMATS[format_name], message, how
    )
    rows = [(f"a scale per {each}", f"{a.zero:.1%}", f"{a.error:.1%}") for each, a in found.items()]
    caption = f"values other than the outliers, {format_name}, measured"
    display(Table(("", "become 0", "relative error"), rows, caption=caption))


def precision_explorer() -> ipywidgets.Widget:
    """Return controls for format, scale, outliers and factor, and ``show_answer``'s output."""
    controls = {
        "format_name": ipywidgets.Dropdown(options=list(FORMATS), description="format"),
        "per": ipywidgets.Dropdown(options=list(SCALES), description="a scale per"),
        "larger": ipywidgets.Dropdown(options=list(LARGER), description="larger"),
        "times": steps("times", [(f"{times:,}", times) for times in TIMES], 10_000),
    }
    return explorer(show_answer, controls, per_row=2)
