"""Where torch must name the device as the user does: ``vgpu:k``, never as C++ knows it."""

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from vgpu.memory import gpus
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.torch_patches.undo import Changes

P = ParamSpec("P")
R = TypeVar("R")

# C++ writes lazy:0 for a device, 'lazy' or device=lazy for its type.
_CPP_NAME = re.compile(rf"\b{gpus.CPP_DEVICE_TYPE}(?=:\d|'|,)")
# And LazyFloatType for a type of tensors, where it has a name like torch.cuda.FloatTensor for CUDA's.
_CPP_TYPE = re.compile(rf"\b(Sparse)?{gpus.CPP_DEVICE_TYPE.capitalize()}(\w+)Type\b")


def naming_devices(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose errors name ``vgpu:k`` where C++ wrote ``lazy:k``."""

    @functools.wraps(function)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, BufferError, TypeError, ValueError) as error:
            text = _named_for_users(str(error))
            if text == str(error):
                raise
            raise type(error)(text) from None

    return renamed


def _named_for_users(text: str) -> str:
    def type_name(found: re.Match[str]) -> str:
        return f"torch.{gpus.DEVICE_TYPE}.{'sparse.' if found[1] else ''}{found[2]}Tensor"

    return _CPP_TYPE.sub(type_name, _CPP_NAME.sub(gpus.DEVICE_TYPE, text))


def install(changes: Changes) -> None:
    enter = functools.partial(_entering, changes=changes, seen=set())
    changes.wrap(TorchDispatchMode, "__enter__", enter)
    changes.wrap(DeviceContext, "__torch_function__", _leaving_out)
    changes.wrap(torch.Tensor, "device", _device)
    changes.wrap(torch.Tensor, "get_device", _get_device)
    changes.wrap(torch.Tensor, "new_tensor", _new_tensor)


def _entering(
    plain: Callable[[TorchDispatchMode], Any], *, changes: Changes, seen: set[type]
) -> Callable[[TorchDispatchMode], Any]:
    """``TorchDispatchMode.__enter__``: what the mode is handed names devices as the user does."""

    @functools.wraps(plain)
    def __enter__(mode: TorchDispatchMode) -> Any:
        owner = next(cls for cls in type(mode).__mro__ if "__torch_dispatch__" in vars(cls))
        # Our own modes know both names, and are called for every operation.
        if owner not in seen and not owner.__module__.startswith("vgpu."):
            seen.add(owner)
            changes.wrap(owner, "__torch_dispatch__", _handed_names)
        return plain(mode)

    return __enter__


def _handed_names(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def __torch_dispatch__(
        mode: TorchDispatchMode,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        device = kwargs and kwargs.get("device")
        if kwargs and isinstance(device, torch.device):
            gpu = gpus.resolve(device)
            if gpu is not None:
                kwargs = {**kwargs, "device": gpu.device}
        return plain(mode, func, types, args, kwargs or {})

    return __torch_dispatch__


def _leaving_out(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The default device, which C++ compares with that of ``out=``: a virtual tensor brings its own."""

    def __torch_function__(
        context: DeviceContext, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = kwargs and kwargs.get("out")
        if isinstance(out, torch.Tensor) and out.device.type == context.device.type:
            return func(*args, **(kwargs or {}))
        return plain(context, func, types, args, kwargs)

    return __torch_function__


# Inside torch.func.grad and vmap C++ wraps each tensor once more. The wrapper is no virtual tensor,
# and knows its device as C++ does.


def _device(plain: Any) -> property:
    """The property ``Tensor.device``, of wrappers too."""
    get_plain = plain.__get__

    def get(tensor: torch.Tensor) -> torch.device:
        device: torch.device = get_plain(tensor)
        if device.type == gpus.CPP_DEVICE_TYPE:
            gpu = gpus.resolve(device)
            if gpu is not None:
                return gpu.device
        return device

    return property(get, doc=plain.__doc__)


def _get_device(plain: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    @functools.wraps(plain)
    def get_device(self: torch.Tensor) -> int:
        return self.device.index if _is_wrapper(self) else plain(self)

    return get_device


def _new_tensor(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        if not _is_wrapper(self):
            return plain(self, data, **options)
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    return new_tensor


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether C++ has wrapped a virtual tensor, which is of a class of its own."""
    return type(tensor) is torch.Tensor and tensor.device.type == gpus.DEVICE_TYPE
