"""What the parent and its ranks send each other: messages, files, and how values are pickled."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from pathlib import Path
from types import CodeType
from typing import IO, Any

import cloudpickle
import torch

import vgpu


@dataclass
class Job:
    """All that a rank has to know when it starts."""

    rank: int
    world_size: int
    backend: str
    threads: int
    gpus: tuple[vgpu.GPUSpec, int] | None
    """The kind and bytes of each rank's virtual GPU; None where ranks have none."""
    connect_nccl: bool
    """Whether NCCL connects the ranks' GPUs before the function begins."""
    environment: dict[str, str]
    sources: dict[str, Any]
    """The parent's linecache entries of code that is in no file: the notebook's cells."""


@dataclass
class Joined:
    """The rank has its process group; the function begins."""

    pid: int
    """Of the rank itself: its parent may know the guard above it alone."""


@dataclass
class Result:
    """The function has returned; its value is in the file ``result_path``."""


@dataclass
class Failure:
    """Why a rank has no result."""

    stamp_ns: int
    kind: str
    """"raised", "exited" (SystemExit), "unsendable" (its result), or "unreadable" (the function)."""
    summary: str
    """The last line of a traceback: type and message."""
    traceback: str
    exception: bytes | None
    """The pickled exception, if it can be pickled."""


def function_path(scratch: Path) -> Path:
    """Where the parent writes the cloudpickle of (function, arguments)."""
    return scratch / "function.pkl"


def result_path(scratch: Path, rank: int) -> Path:
    """Where a rank writes the cloudpickle of what the function returned.

    A file takes large tensors about three times faster than the pipe, and holds them once.
    """
    return scratch / f"result-{rank}.pkl"


def crash_path(scratch: Path, rank: int) -> Path:
    """Where faulthandler writes when the process crashes."""
    return scratch / f"crash-{rank}.txt"


def _code_in_its_file(make: Callable[..., CodeType], parts: tuple[Any, ...], name: str) -> CodeType:
    return make(*parts).replace(co_filename=name)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            # From 3.1.3 on cloudpickle drops the name of the file, which tracebacks and reports show.
            make, parts = self.dispatch_table[CodeType](obj)
            return _code_in_its_file, (make, parts, obj.co_filename)
        device = obj
        if isinstance(obj, torch.Tensor) or type(obj).__module__.startswith("vgpu."):
            device = getattr(obj, "device", None)
        if isinstance(device, torch.device) and device.type == "vgpu":
            kind = "tensor" if isinstance(obj, torch.Tensor) else type(obj).__name__
            what = f"the device {device}" if obj is device else f"a {kind} on {device}"
            raise TypeError(
                f"{what} cannot leave its process: each process has virtual GPUs of its "
                "own, or none. Send CPU tensors (tensor.cpu(), module.cpu()), and choose the device "
                "where they arrive"
            )
        return super().reducer_override(obj)


def dump(value: Any, file: IO[bytes]) -> None:
    """Write a value as cloudpickle bytes; what is defined in a cell is pickled by value.

    Raises what pickling raises, and TypeError for whatever is on a virtual GPU.
    """
    _Pickler(file).dump(value)


def dumps(value: Any) -> bytes:
    """What ``dump`` writes."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """(function, args) as ``dump`` writes it; TypeError names what cannot be pickled."""
    try:
        return dumps((function, args))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"launch.run cannot send {name} to other processes{_culprit(function, args)}: {error}. "
            "Make such a thing inside the function, on each rank."
        ) from error


def _culprit(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    parts = {f"argument {i} after the number of ranks": arg for i, arg in enumerate(args, start=1)}
    if isfunction(function):
        names = getclosurevars(function)
        for name, value in {**names.globals, **names.nonlocals}.items():
            parts[f"the variable {name!r} that it uses"] = value
    for where, value in parts.items():
        try:
            dumps(value)
        except Exception:
            return f", because of {where} ({type(value).__name__})"
    return ""
