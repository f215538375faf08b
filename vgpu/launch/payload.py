"""What travels between the notebook and its ranks, as bytes: functions, arguments, results."""

import io
from collections.abc import Callable
from inspect import getclosurevars, isfunction
from typing import IO, Any

import cloudpickle
import torch

ADVICE = "Make such a thing inside the function, on each rank."


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if device := _virtual_gpu(obj):
            kind = "tensor" if isinstance(obj, torch.Tensor) else type(obj).__name__
            found = f"the device {device}" if obj is device else f"a {kind} on {device}"
            raise TypeError(
                f"{found} cannot leave its process: each process has virtual GPUs of its "
                "own, or none. Send CPU tensors (tensor.cpu(), module.cpu()), and choose the device "
                "where they arrive"
            )
        return super().reducer_override(obj)


def dump(value: Any, file: IO[bytes]) -> None:
    """Write a value as cloudpickle bytes; what comes from a cell travels by value.

    Raises what pickling raises, and TypeError for whatever is on a virtual GPU.
    """
    _Pickler(file).dump(value)


def dumps(value: Any) -> bytes:
    """What ``dump`` writes."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call for the ranks; TypeError names the argument or variable that cannot be sent."""
    try:
        return dumps((function, args))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        culprit = _unpicklable_part(function, args)
        raise TypeError(
            f"launch.run cannot send {name} to other processes{culprit}: {error}. {ADVICE}"
        ) from error


def _virtual_gpu(value: Any) -> torch.device | None:
    """The virtual GPU that a value names or is on, if any."""
    device = value
    if isinstance(value, torch.Tensor) or type(value).__module__.startswith("vgpu."):
        device = getattr(value, "device", None)
    return device if isinstance(device, torch.device) and device.type == "vgpu" else None


def _unpicklable_part(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
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
