"""The report at the end of a run: whether it used virtual GPUs, and where ``cuda`` was replaced.

A run may have many processes, such as a launcher, its ranks and their workers. The first one
creates a file and names it in the environment; every process adds a line when it exits, and the
first one reads them all.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch

from vgpu import cuda_is_vgpu
from vgpu.collectives.dispatch import tally
from vgpu.memory import gpus
from vgpu.torch_patches import device_module
from vgpu.units import format_bytes

_FILE = "VGPU_RUN_FILE"

asked_cuda: set[str] = set()
"""Packages that asked torch for CUDA GPUs, and were told that there are none."""


@dataclass
class Report:
    """The combined report of a run's processes."""

    used: bool = False
    """Whether anything was put on a virtual GPU."""
    asked: set[str] = field(default_factory=set)
    lines: dict[str, None] = field(default_factory=dict)
    """Descriptions of the words replaced in each of the program's files; a dict keeps the order."""
    packages: dict[str, int] = field(default_factory=dict)
    """For each installed package, the number of files in which words were replaced."""

    def add(self, used: bool, asked: list[str], lines: list[str], packages: dict[str, int]) -> None:
        self.used |= used
        self.asked |= set(asked)
        self.lines |= dict.fromkeys(lines)
        for name, count in packages.items():
            self.packages[name] = max(count, self.packages.get(name, 0))

    def replaced(self) -> list[str]:
        found = list(self.lines)
        if self.packages:
            files = (f"{name} (files: {count})" for name, count in sorted(self.packages.items()))
            found.append(f"reads cuda as {gpus.DEVICE_TYPE} in packages: {', '.join(files)}")
        return found

    def unused(self, cuda_is_vgpu: bool) -> str | None:
        """Return why no virtual GPU was used, as far as is known, or None if one was used."""
        if self.used:
            return None
        advice = "add --read {}" if cuda_is_vgpu else "add --cuda-is-vgpu"
        who = sorted(self.asked - {"__main__"}) or sorted(self.asked)
        if not who:
            return "no virtual GPU was used: nothing was put on one"
        name = who[0].replace("__main__", "the program")
        return (
            f"no virtual GPU was used: {name} asked for CUDA and found none; "
            f"{advice.format(name)} to let it find the virtual GPUs"
        )


def begin() -> None:
    """Make this process add its line when it exits, and note which packages ask for CUDA."""
    for name in ("is_available", "device_count"):
        setattr(torch.cuda, name, _noting_who_asks(getattr(torch.cuda, name)))
    if not is_first_process():
        _at_exit()
    else:
        handle, os.environ[_FILE] = tempfile.mkstemp(prefix="vgpu-run-")
        os.close(handle)
    # multiprocessing drops atexit handlers in the processes that it forks.
    util.register_after_fork(begin, lambda _: _at_exit())


def is_first_process() -> bool:
    """Whether no process of the run has called ``begin`` yet."""
    return _FILE not in os.environ


def _noting_who_asks(plain: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(plain)
    def noting() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller != "torch":
            asked_cuda.add(caller)
        return plain()

    return noting


def _at_exit() -> None:
    util.Finalize(None, _add_line, exitpriority=-2)


def _add_line() -> None:
    if not os.path.exists(os.environ[_FILE]):
        return  # the first process exited before this one
    with open(os.environ[_FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(_of_this_process()) + "\n")


def _of_this_process() -> dict[str, Any]:
    lines, packages = cuda_is_vgpu.replaced()
    used = any(gpus.by_index(i).memory.allocation_count for i in range(gpus.device_count()))
    return {"used": used, "asked": sorted(asked_cuda), "lines": lines, "packages": packages}


def end() -> Report:
    """Return the combined report; called in the first process, when the program ends."""
    report = Report()
    report.add(**_of_this_process())
    file = Path(os.environ[_FILE])
    for line in file.read_text(encoding="utf-8").splitlines():
        report.add(**json.loads(line))
    file.unlink()
    return report


def summary() -> str:
    """Return a line for each GPU that this process used, with its peak, and for each collective."""
    lines = []
    for index in range(gpus.device_count()):
        gpu = gpus.by_index(index)
        if gpu.memory.allocation_count:
            peak = format_bytes(device_module.max_memory_allocated(index))
            of = format_bytes(gpu.memory.capacity_bytes)
            lines.append(f"{gpu.device} ({gpu.spec.name}): at most {peak} of {of} allocated")
    for name, calls in sorted(tally.calls.items()):
        lines.append(f"{name}: {calls} calls, {format_bytes(tally.bytes[name])} of input")
    rank = os.environ.get("RANK")
    who = f"rank {rank}: " if rank is not None else ""
    return "\n".join(who + line for line in lines or ["no virtual GPU was used"])


def show_summary() -> None:
    """Print the summary with a single write, so that lines from different ranks aren't interleaved."""
    sys.stdout.flush()
    sys.stderr.write(summary() + "\n")
    sys.stderr.flush()
