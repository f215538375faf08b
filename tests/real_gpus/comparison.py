"""Compare what real and virtual GPUs did, and write a Markdown section about it."""

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import vgpu
from teaching.lessons import ROOT
from vgpu.units import format_bytes, format_seconds

OBSERVED = Path(__file__).with_name("observed.py")
# The workspaces of CUDA's libraries are allocated in addition to the model's tensors.
WITHOUT_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
CLEARLY = 2
"""Two times are compared if, in virtual time, one is at least this many times the other."""


def observe(*command: str) -> dict:
    """Return what ``observed.py`` prints, run with Python's arguments ``command``.

    Raises RuntimeError with its stderr if it fails.
    """
    done = subprocess.run(
        [sys.executable, *command, str(OBSERVED)],
        cwd=ROOT,
        env={**os.environ, **WITHOUT_WORKSPACES, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} {OBSERVED.name} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def virtual_command(count: int, gpu: str) -> list[str]:
    """Return the arguments that run a program on virtual GPUs, as the README describes."""
    return ["-m", "vgpu", "--cuda-is-vgpu", "--count", str(count), "--gpu", gpu]


def preset_for(name: str) -> str:
    """Return the preset to compare with a real GPU; H100 if none has its name."""
    return next((preset for preset in vgpu.PRESETS if preset in name), "H100")


def in_cuda_s_words(message: str) -> str:
    """Return an error's first line with CUDA's names, up to the sizes of one machine's memory.

    The lines that CUDA adds are advice that depends on how PyTorch was built.
    """
    for ours, theirs in (("vgpu", "cuda"), ("VGPU", "CUDA"), ("vccl", "nccl")):
        message = message.replace(ours, theirs)
    return message.partition("\n")[0].partition(" GPU 0 has a total capacity")[0]


def differences(real: dict, virtual: dict) -> list[str]:
    """Return a sentence for each thing that real and virtual GPUs did differently."""
    found = []
    for part in ("errors", "peaks", "times"):
        for name in sorted(real[part].keys() ^ virtual[part].keys()):
            where = "real" if name in real[part] else "virtual"
            found.append(f"{part}: {name!r} was observed only on {where} GPUs")
    for name in _in_both(real, virtual, "errors"):
        on_real, on_virtual = (in_cuda_s_words(each["errors"][name]) for each in (real, virtual))
        if on_real != on_virtual:
            found.append(f"error of {name!r}: real {on_real!r}, virtual {on_virtual!r}")
    for name in _in_both(real, virtual, "peaks"):
        sizes = zip(real["peaks"][name], virtual["peaks"][name], strict=True)
        for gpu, (on_real, on_virtual) in enumerate(sizes):
            if on_real != on_virtual:
                found.append(
                    f"peak of {name!r} on GPU {gpu}: real {on_real:,} bytes, virtual "
                    f"{on_virtual:,} ({on_real / on_virtual - 1:+.2%})"
                )
    for longer, shorter in _clear_pairs(real, virtual):
        if real["times"][longer] < real["times"][shorter]:
            found.append(
                f"order of times: on virtual GPUs, {longer!r} takes longer than {shorter!r} "
                f"({_both_times(virtual, longer, shorter)}); on real ones, it's the reverse "
                f"({_both_times(real, longer, shorter)})"
            )
    return found


def _in_both(real: dict, virtual: dict, part: str) -> list[str]:
    return [name for name in real[part] if name in virtual[part]]


def _clear_pairs(real: dict, virtual: dict) -> list[tuple[str, str]]:
    """Return pairs of names, the longer time first, whose virtual times clearly differ."""
    times, pairs = virtual["times"], []
    for pair in combinations(_in_both(real, virtual, "times"), 2):
        longer, shorter = sorted(pair, key=times.__getitem__, reverse=True)
        if times[longer] >= CLEARLY * times[shorter]:
            pairs.append((longer, shorter))
    return pairs


def _both_times(observed: dict, *names: str) -> str:
    return ", ".join(format_seconds(observed["times"][name]) for name in names)


def page(real: dict, virtual: dict, date: str) -> str:
    """Return a section for docs/real_gpus.md: hardware, what agrees or differs, peaks, times."""
    machine, differing = real["hardware"], differences(real, virtual)
    count = {part: len(_in_both(real, virtual, part)) for part in ("errors", "peaks")}
    rows = [
        "| times | real, measured | virtual time |",
        "|---|---|---|",
        *(
            f"| {name} | {format_seconds(real['times'][name])} "
            f"| {format_seconds(virtual['times'][name])} |"
            for name in _in_both(real, virtual, "times")
        ),
        "",
        "| peak of a step | real, counted | virtual, counted |",
        "|---|---|---|",
        *(
            f"| {name} | {_sizes(real['peaks'][name])} | {_sizes(virtual['peaks'][name])} |"
            for name in _in_both(real, virtual, "peaks")
        ),
    ]
    gpus = machine["gpus"]
    return "\n".join(
        [
            f"### {date} · {len(gpus)} × {gpus[0]}",
            "",
            f"PyTorch {machine['torch']}, CUDA {machine['CUDA']}, compared with "
            f"{len(virtual['hardware']['gpus'])} × {virtual['hardware']['gpus'][0]}: "
            f"{count['errors']} errors, {count['peaks']} peaks, "
            f"{len(_clear_pairs(real, virtual))} pairs of times. "
            f"{len(differing) or 'No'} difference{'s' * (len(differing) != 1)}.",
            "",
            *(f"- {_escaped(each)}" for each in differing),
            *([""] if differing else []),
            *rows,
            "",
        ]
    )


def _sizes(sizes: list[int]) -> str:
    return ", ".join(map(format_bytes, sizes))


def _escaped(text: str) -> str:
    return re.sub(r"([*_`<>|])", r"\\\1", text)
