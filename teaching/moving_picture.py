"""The moving picture at the top of the README: ten lines, and what they do on eight GPUs.

    python -m teaching.moving_picture docs/eight_gpus.gif

The lines on it are run, and what is drawn is their output: the text that they print and the
timeline of one training step, in virtual time. A still goes beside it, as a PNG.
"""

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

import vgpu
from helpers.plots.style import COLOURS, figure
from helpers.plots.timeline import _OF_KIND, kind_of, stretches

SET_UP = """\
import torch
from torch import nn
import vgpu

vgpu.enable(8, gpu="H100")
layers = [nn.Linear(2048, 2048) for _ in range(4)]
model = nn.Sequential(*layers).to("vgpu:0")
model = nn.DataParallel(model)
batch = torch.randn(1024, 2048)

"""
STEP = """\
with vgpu.record() as step:
    model(batch).sum().backward()
"""
LAST = """\
print(torch.vgpu.device_count(), "GPUs")
print(f"a step of {step.makespan_s * 1e3:.2f} ms")
"""
WIDTH, HEIGHT = 9.6, 4.1
GROUND, PAPER, INK = "#FFFFFF", "#F5F7FA", "#1F2933"
GROWING, GROWING_MS, LINE_MS, END_MS = 36, 70, 450, 4000


def run() -> tuple[vgpu.Timeline, str]:
    """Run the lines on the picture: the recorded step, and what they print."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(SET_UP + STEP + LAST, names)
        finally:
            vgpu.disable()
    return names["step"], printed.getvalue()


def frames() -> Iterator[tuple[Image.Image, int]]:
    """The pictures in order, each with how long it stays, in milliseconds."""
    step, printed = run()
    lines = (SET_UP + STEP + LAST).splitlines()
    # First the end: where nothing moves, as in a print or a preview, it says most.
    yield _drawn(step, lines, printed, step.makespan_s), END_MS
    for count in range(4, len(lines) + 1):
        yield _drawn(step, lines[:count], "", 0.0), LINE_MS
    for number in range(1, GROWING + 1):
        yield _drawn(step, lines, "", step.makespan_s * number / GROWING), GROWING_MS


def _drawn(step: vgpu.Timeline, lines: list[str], printed: str, until_s: float) -> Image.Image:
    made, axes = figure(width=WIDTH, height=HEIGHT)
    made.set_layout_engine("none")
    made.set_facecolor(GROUND)
    _write_code(made, lines, printed)
    axes.set_position((0.535, 0.13, 0.45, 0.72))
    lanes = {str(device): step.of(device) for device in step.devices}
    per_ms = 1e3
    for row, events in enumerate(lanes.values()):
        for kind, start_s, end_s in stretches(events, step.makespan_s / 2000):
            span = (start_s * per_ms, (min(end_s, until_s) - start_s) * per_ms)
            if span[1] > 0:
                axes.broken_barh([span], (row - 0.36, 0.72), color=_OF_KIND[kind], linewidth=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, step.makespan_s * per_ms)
    axes.set_xlabel("ms of virtual time", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", visible=False)
    seen = {kind_of(event) for events in lanes.values() for event in events}
    shown = [kind for kind in _OF_KIND if kind in seen]
    place = 0.535
    for kind in shown:
        made.text(place, 0.90, "■", color=_OF_KIND[kind], fontsize=11)
        made.text(place + 0.017, 0.903, kind, color=INK, fontsize=8.5)
        place += 0.035 + 0.0075 * len(kind)
    return _image(made)


def _write_code(made: Figure, lines: list[str], printed: str) -> None:
    paper = plt.Rectangle((0.012, 0.03), 0.445, 0.94, transform=made.transFigure, color=PAPER)
    made.add_artist(paper)
    style: Any = {"family": "DejaVu Sans Mono", "fontsize": 7.6, "va": "top"}
    for row, line in enumerate(lines):
        made.text(0.025, 0.945 - 0.052 * row, line, color=INK, **style)
    for row, line in enumerate(printed.splitlines()):
        made.text(0.025, 0.15 - 0.055 * row, line, color=COLOURS["blue"], **style)


def _image(made: Figure) -> Image.Image:
    file = io.BytesIO()
    made.savefig(file, format="png", dpi=100)
    plt.close(made)
    return Image.open(file).convert("RGB")


def write(target: Path) -> Path:
    """Write the picture, and a still of its first frame beside it, whose path is returned."""
    pictures, stay_ms = zip(*frames(), strict=True)
    # One palette for all, so that nothing flickers and little changes from one to the next.
    palette = pictures[0].quantize(64, method=Image.Quantize.MEDIANCUT)
    few = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    few[0].save(target, save_all=True, append_images=few[1:], duration=list(stay_ms), loop=0,
                optimize=True)  # fmt: skip
    still = target.with_suffix(".png")
    pictures[0].save(still, optimize=True)
    return still


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.moving_picture", description="See this file.")
    parser.add_argument("target", type=Path, help="the picture, a GIF")
    target = parser.parse_args(arguments).target
    print(f"{target} and {write(target)}")


if __name__ == "__main__":
    main()
