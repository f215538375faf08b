"""Names that only ``torch.cuda`` has, added to ``torch.vgpu`` if a program's cuda means vgpu.

Many packages import such a name, or use it with ``isinstance``, but never call it. So a class,
function or module of that name exists, and using it raises NotImplementedError. Programs written
for virtual GPUs don't get these names: there, ``hasattr(torch.vgpu, "CUDAGraph")`` is False.
"""

import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from vgpu.memory import gpus
from vgpu.torch_patches import device_module
from vgpu.torch_patches.undo import Changes


def install(changes: Changes) -> None:
    changes.set(device_module, "default_generators", _Generators())
    changes.set(device_module, "has_half", True)
    changes.set(device_module, "has_magma", True)
    changes.set(device_module, "is_current_stream_capturing", lambda: False)
    changes.set(device_module, "get_arch_list", _get_arch_list)
    _complete(device_module, torch.cuda, changes)
    if dist.is_available() and dist.is_nccl_available():  # torch's own function, which needs no GPU
        changes.set(vars(device_module)["nccl"], "version", torch.cuda.nccl.version)
    # This function is private, but tests for streams call it.
    changes.item(vars(device_module), "_sleep", _refusing(f"{torch.cuda.__name__}._sleep", None))
    changes.wrap(torch.amp.GradScaler, "__init__", _for_virtual_gpus)
    # torch.testing uses these names to run CUDA tests on separate streams.
    if not torch.cuda.is_available():
        changes.set(torch._C, "_cuda_setDevice", device_module.set_device)
        changes.set(torch._C, "_cuda_setStream", _set_stream)


class _Generators:
    """A sequence of the GPUs' generators."""

    def __len__(self) -> int:
        return gpus.device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        return gpus.default_generator(gpus.meant_by(index))


def _get_arch_list() -> list[str]:
    """Return the compute capabilities of the GPUs, such as "sm_90"."""
    found = map(device_module.get_device_capability, range(gpus.device_count()))
    return sorted({f"sm_{major}{minor}" for major, minor in found})


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    device_module.set_stream(device_module.Stream(device_index, stream_id=stream_id))


def _complete(
    ours: ModuleType, theirs: ModuleType, changes: Changes, around: dict[int, Any] | None = None
) -> None:
    """Add to a module in ``torch.vgpu`` the names that only its counterpart in ``torch.cuda`` has.

    ``around`` maps the id of an object in ``torch.cuda`` to its counterpart in an enclosing module,
    since ``torch.cuda.amp.autocast_mode.autocast`` is ``torch.cuda.amp.autocast``.
    """
    known = dict(around or {})
    known |= {id(there): vars(ours)[name] for name, there in _public(theirs) if name in vars(ours)}
    for name, there in _public(theirs):
        here = vars(ours).get(name)
        if isinstance(there, ModuleType):
            full_name = f"{_vgpu_name(theirs)}.{name}"
            if here is None:
                here = ModuleType(full_name, f"Names in ``{there.__name__}``, for imports only.")
                changes.set(ours, name, here)
                changes.item(sys.modules, full_name, here)
            _complete(here, there, changes, known)
        elif name not in vars(ours):
            refusing = _refusing(f"{theirs.__name__}.{name}", there)
            changes.set(ours, name, known.get(id(there), refusing))


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield torch's own classes, functions and modules in a module, except tensor types."""
    for name, value in list(vars(module).items()):
        if name.startswith("_") or name.endswith("Tensor"):
            continue
        if isinstance(value, ModuleType):
            if value.__name__ == f"{module.__name__}.{name}":
                yield name, value
        elif callable(value) and str(getattr(value, "__module__", "")).startswith("torch"):
            yield name, value


def _vgpu_name(module: ModuleType) -> str:
    return module.__name__.replace("cuda", gpus.DEVICE_TYPE, 1)


def _refusing(name: str, there: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} was used, but virtual GPUs have nothing like it: turn it off for this run"
        )

    if isinstance(there, type):
        return type(there.__name__, (), {"__new__": refuse, "__module__": __name__})
    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def _for_virtual_gpus(plain: Any) -> Any:
    """Replace the default device "cuda" of ``torch.amp.GradScaler`` and its subclasses."""

    @functools.wraps(plain)
    def __init__(self: Any, device: str = "cuda", *args: Any, **options: Any) -> None:
        plain(self, gpus.DEVICE_TYPE if device == "cuda" else device, *args, **options)

    return __init__
