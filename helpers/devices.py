"""Pick the devices for a lesson: real GPUs if there are enough, otherwise virtual ones.

Set the environment variable VGPU_DEVICES to "vgpu" to use virtual GPUs on any machine, or to "cuda"
to require real ones.
"""

import os

import torch

import vgpu
from vgpu.tables import Table
from vgpu.units import format_bytes

_CHOICES = ("auto", "cuda", "vgpu")
# Lessons count the bytes of tensors. cuBLAS workspaces of 8 or 32 MiB, which PyTorch allocates for
# each thread and stream (since 2.15 only if asked to), would hide them. The first matmul reads
# these variables; ranks inherit them.
_WITHOUT_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def lab(count: int) -> list[torch.device]:
    """Return ``count`` GPUs for a lesson, as ``torch.device`` objects with ordinals.

    They're ``[cuda:0, cuda:1, ...]`` if that many exist, otherwise ``[vgpu:0, vgpu:1, ...]``; in
    the latter case, there are exactly ``count`` virtual GPUs afterwards, unless the lesson has
    already enabled more. A lesson calls this function once, with the largest number it needs, and
    slices the list. On real GPUs, cuBLAS workspaces are disabled through environment variables,
    unless those are already set. Raises ValueError if the count is below 1, VGPU_DEVICES is
    unknown, or VGPU_DEVICES=cuda and there aren't enough GPUs.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"devices.lab(count) takes an integer of at least 1; got {count!r}")
    kind, _ = _choose(count)
    if kind == "vgpu" and not (
        vgpu.is_enabled() and torch.get_device_module("vgpu").device_count() >= count
    ):
        vgpu.enable(count=count)
    return [torch.device(kind, index) for index in range(count)]


def describe(count: int = 8) -> Table:
    """Return a table of what this machine has, what lessons with ``count`` GPUs use, and why."""
    kind, why = _choose(count)
    threads = torch.get_num_threads()
    used = f"{count} {'virtual' if kind == 'vgpu' else 'real'} GPU{'s' if count > 1 else ''}"
    named = f"{kind}:0" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
    return Table(
        ("this machine", ""),
        (
            ("PyTorch", torch.__version__),
            (
                "CPU",
                f"{os.cpu_count()} cores, {threads} PyTorch thread{'s' if threads > 1 else ''}",
            ),
            ("real GPUs", _real_gpus()),
            ("this course uses", f"{used} ({named})"),
            ("because", why),
            *([("cuBLAS workspaces", _workspaces())] if kind == "cuda" else []),
        ),
    )


def _choose(count: int) -> tuple[str, str]:
    """Return the device type for ``count`` GPUs, and the reason, in one sentence.

    If there are real GPUs, also disable their cuBLAS workspaces: ranks may use real GPUs even if
    the lesson itself uses virtual ones.
    """
    asked = os.environ.get("VGPU_DEVICES", "auto")
    if asked not in _CHOICES:
        raise ValueError(f"VGPU_DEVICES is {asked!r}; it can be {', '.join(_CHOICES)} or unset")
    if asked == "vgpu":
        return "vgpu", "VGPU_DEVICES=vgpu asks for virtual GPUs."
    real = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if real:
        _do_without_workspaces()
    # A process must use only one kind of GPU, because DataParallel uses one device type for everything.
    if real >= count and (asked == "cuda" or not vgpu.is_enabled()):
        return "cuda", f"Real GPUs on this machine: {real}; needed: {count}."
    if asked == "cuda":
        raise ValueError(
            f"VGPU_DEVICES=cuda asks for real GPUs; the lesson needs {count} and this machine "
            f"has {real}. Unset the variable to use virtual ones."
        )
    if real >= count:
        return "vgpu", "Virtual GPUs are already in use in this notebook."
    return "vgpu", f"Real GPUs on this machine: {real}; needed: {count}. Virtual ones are used."


def _do_without_workspaces() -> None:
    for name, value in _WITHOUT_WORKSPACES.items():
        os.environ.setdefault(name, value)


def _workspaces() -> str:
    name, without = next(iter(_WITHOUT_WORKSPACES.items()))
    value = os.environ[name]
    if value == without:
        return f"none, so that only the bytes of tensors are counted ({name}={value})"
    return f"counted along with the tensors, because {name}={value} asks for them"


def _real_gpus() -> str:
    names = [
        f"{torch.cuda.get_device_name(i)} ({format_bytes(torch.cuda.mem_get_info(i)[1])})"
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    if torch.backends.mps.is_available():
        names.append("Apple GPU (mps)")
    return ", ".join(names) or "none"
