"""The methods of virtual tensors: overrides of device-dependent ``torch.Tensor`` methods.

To C++, a virtual tensor is on ``lazy:k``. In Python, its ``device`` property says ``vgpu:k``;
methods that compare devices or read memory in C++ are overridden here.
"""

import builtins
import copy
import functools
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from numpy.typing import NDArray
from torch._subclasses import fake_tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operators import Args, Kwargs, Operator, tensors_in
from vgpu.tensor.refusals import subclass_refused
from vgpu.torch_patches.undo import Changes

P = ParamSpec("P")
R = TypeVar("R")

# C++ writes lazy:0 for a device, and 'lazy' or device=lazy for its type.
_CPP_NAME = re.compile(rf"\b{gpus.CPP_DEVICE_TYPE}(?=:\d|'|,)")
# C++ writes LazyFloatType for a tensor type, and torch.cuda.FloatTensor for CUDA's.
_CPP_TYPE = re.compile(rf"\b(Sparse)?{gpus.CPP_DEVICE_TYPE.capitalize()}(\w+)Type\b")


def naming_devices(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that its errors say ``vgpu:k`` instead of ``lazy:k``."""

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


# Attributes that make a tensor virtual.
HELD = {"_block", "_given_data", "_gpu", "_inner"}
# Attributes that any virtual tensor may have; torch sets ``_is_param`` on a Parameter.
OWN_ATTRIBUTES = {*HELD, "_is_param"}

_new = naming_devices(torch.Tensor.new)


class Host:
    """Stands in for a GPU for shapes on the host, whose bytes aren't counted."""

    index = -1
    device = cpp_device = torch.device("cpu")


HOST = Host()
Place = VirtualGPU | Host


class TensorMethods(torch.Tensor):
    """The methods of :class:`vgpu.tensor.tensor.VirtualTensor`; never instantiated itself."""

    _gpu: VirtualGPU
    _block: Block | None = None  # for shapes, which have no storage with values
    _inner: torch.Tensor  # a CPU tensor with the values; for shapes, a meta tensor
    _given_data = False  # whether .data was assigned: earlier views then have different memory

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu.device

    grad = property(
        torch._C.TensorBase.grad.__get__,  # type: ignore[union-attr]
        naming_devices(torch._C.TensorBase.grad.__set__),  # type: ignore[union-attr]
    )
    tensor_split = naming_devices(torch.Tensor.tensor_split)  # type: ignore[assignment]

    def get_device(self) -> int:
        return self._gpu.index

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call ``Tensor.to``, which compares devices in C++ and thus needs the C++ device."""
        if "device" in kwargs:
            kwargs["device"] = cpp_device(kwargs["device"])
        elif args:
            args = (cpp_device(args[0]), *args[1:])
        return super().to(*args, **kwargs)

    def type(  # type: ignore[override]
        self,
        dtype: torch.dtype | str | None = None,
        non_blocking: bool = False,
        **kwargs: Any,
    ) -> str | torch.Tensor:
        if dtype is None and self.layout is not torch.strided:  # C++ has no name for the type
            return self._inner.type().replace("torch", f"torch.{gpus.DEVICE_TYPE}", 1)
        if dtype is None:
            return super().type().replace(gpus.CPP_DEVICE_TYPE, gpus.DEVICE_TYPE)
        return super().type(dtype, non_blocking, **kwargs)

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise _not_numpy(self.device)

    def __array__(self, dtype: object = None) -> NDArray[Any]:
        raise _not_numpy(self.device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self._inner.data_ptr()

    def record_stream(self, stream: torch.Stream) -> None:
        """Call the handler: FSDP1 calls this below Python dispatch, where C++ has no kernel."""
        func = torch.ops.aten.record_stream.default
        cls: Any = type(self)
        cls.__torch_dispatch__(func, (cls,), (self, stream))

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Run the legacy constructor.

        The C++ constructor ignores the device index and fails for sparse tensors.
        """
        if self.layout is torch.sparse_coo and args:
            return torch.sparse_coo_tensor(
                *args, dtype=self.dtype, device=self.device, check_invariants=False
            )
        if not kwargs and all(type(size) is int for size in args):
            return self.new_empty(args or (0,))
        if not kwargs and len(args) == 1 and isinstance(args[0], list | tuple):
            sizes = isinstance(args[0], torch.Size)
            return self.new_empty(args[0]) if sizes else self.new_tensor(args[0])
        result: torch.Tensor = _new(self, *args, **kwargs)
        return result

    def as_subclass(self, cls: builtins.type[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        if not issubclass(type(self), cls):
            raise subclass_refused(cls)
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the values' storage, which is on the CPU; it shows which tensors share memory."""
        return self._inner.untyped_storage()

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        if tensor_contents is None and self.layout is torch.strided and self.numel() > 0:
            with torch.no_grad():
                tensor_contents = torch._tensor_str._tensor_str(self._inner, len("tensor("))
        text: str = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        text = text.replace("Tensor(", "tensor(", 1)
        if isinstance(self, torch.nn.Parameter):
            text = text.removeprefix("Parameter(").removesuffix(")")
            return f"Parameter containing:\n{text}"
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        known: torch.Tensor | None = memo.get(id(self))
        if known is not None:
            return known
        if isinstance(self, torch.nn.Parameter):  # as in torch, without the gradient and attributes
            values = self.detach().clone(memory_format=torch.preserve_format)
            copied = memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
            return copied
        with torch.inference_mode(False):  # otherwise autograd can't find a changed view's history
            is_leaf = self.is_leaf
        if not is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment.  If you were attempting to deepcopy a module, this may be "
                "because of a torch.nn.utils.weight_norm usage, "
                "see https://github.com/pytorch/pytorch/pull/103001"
            )
        result = self._copy_memory(memo)
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        others = {name: value for name, value in vars(self).items() if name not in HELD}
        vars(result).update(copy.deepcopy(others, memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def _copy_memory(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy the tensor without its gradient; copies share memory if the tensors do."""
        raise NotImplementedError

    def __format__(self, format_spec: str) -> str:
        return self.item().__format__(format_spec) if self.dim() == 0 else repr(self)


SHAPES: set[type] = set()
"""The class of shapes, for modules that can't import it because tensor.py imports them."""


class ShapeMethods(TensorMethods):
    """The methods of :class:`vgpu.tensor.tensor.ShapeTensor`, which has no values."""

    _gpu: Place  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        SHAPES.add(cls)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the block's storage, whose size is rounded; it shows which shapes share memory.

        The inner tensor's storage can't show that, since all shapes with the same metadata share
        it.
        """
        block = self._block
        if block is None:
            return torch.UntypedStorage(self._inner.untyped_storage().nbytes(), device="meta")
        if block.storage is None:
            block.storage = torch.UntypedStorage(block.size_bytes, device="meta")
            block.storage._vgpu_block = weakref.proxy(block)
        storage: torch.UntypedStorage = block.storage
        return storage

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        raise no_value(self, "numpy()")

    def __array__(self, dtype: object = None) -> NDArray[Any]:
        raise no_value(self, "numpy()")

    def tolist(self) -> Any:
        raise no_value(self, "tolist()")

    def data_ptr(self) -> int:
        raise no_value(self, "data_ptr()")

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return f"shape({list(self.size())}, device='{self.device}', dtype={self.dtype}{gradient})"


class NoValueError(RuntimeError):
    """A value was requested from a tensor that is only a shape."""


def no_value(asked: torch.Tensor, operation: str) -> NoValueError:
    name = "item()" if operation == "_local_scalar_dense" else operation
    return NoValueError(
        f"{name} needs the values of a tensor of size {list(asked.size())} on {asked.device}, but "
        "it is only a shape: it was created or moved in a vgpu.shapes_only() block, where nothing "
        "is computed. Use only sizes, bytes and virtual time there, or run without shapes_only() "
        "to get values."
    )


def has_values(changed: torch.Tensor, operation: str) -> RuntimeError:
    return RuntimeError(
        f"{operation} would change a tensor of size {list(changed.size())} on {changed.device} "
        "that has values, but shapes_only() computes none: create the model, or move it to its "
        "GPU, inside the block"
    )


def _not_numpy(device: torch.device) -> TypeError:
    return TypeError(
        f"can't convert {device} device type tensor to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first."
    )


def cpp_device(device: Any) -> Any:
    """Return the C++ device of a virtual GPU; return anything else unchanged."""
    if isinstance(device, str) and device.startswith(gpus.DEVICE_TYPE):
        device = torch.device(device)
    elif type(device) is int:
        return gpus.by_index(device).cpp_device
    if isinstance(device, torch.device):
        gpu = gpus.resolve(device)
        if gpu is not None:
            return gpu.cpp_device
    return device


def virtual_among(values: Iterable[Any]) -> list[Any]:
    """Return the virtual tensors among ``values``, including those in lists and tuples."""
    return [tensor for tensor in tensors_in(tuple(values)) if isinstance(tensor, TensorMethods)]


def strided_parts(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor's strided parts: itself, or a sparse tensor's indices and values."""
    if values.layout is torch.strided:
        return (values,)
    if values.layout is torch.sparse_coo:
        return values._indices(), values._values()
    if values.layout in (torch.sparse_csr, torch.sparse_bsr):
        return values.crow_indices(), values.col_indices(), values.values()
    return values.ccol_indices(), values.row_indices(), values.values()


def count_bytes(values: torch.Tensor, gpu: VirtualGPU, operation: str) -> Block:
    """Return the block for the storage of ``values``; allocate it on ``gpu`` if it's missing."""
    storage = values.untyped_storage()
    block: Block | None = getattr(storage, "_vgpu_block", None)
    if block is None:
        block = gpu.memory.allocate(storage.nbytes(), operation)
        storage._vgpu_block = block  # type: ignore[attr-defined]
    return block


# Where torch must use the Python name of a device for tensors that aren't of our class


def install(changes: Changes) -> None:
    enter = functools.partial(_entering, changes=changes, seen=set())
    changes.wrap(TorchDispatchMode, "__enter__", enter)
    changes.wrap(DeviceContext, "__torch_function__", _leaving_out)
    changes.wrap(torch.Tensor, "device", _device)
    changes.wrap(torch.Tensor, "new_tensor", _new_tensor)
    # C++ gets a fake tensor's device from its mode or, while that's inactive, from its class.
    changes.item(fake_tensor._DISPATCH_META_HANDLERS, _DEVICE, _fake_device_handler)
    changes.wrap(fake_tensor.FakeTensor, "__torch_dispatch__", _of_fake_tensor)


def _entering(
    plain: Callable[[TorchDispatchMode], Any], *, changes: Changes, seen: set[type]
) -> Callable[[TorchDispatchMode], Any]:
    """Wrap ``TorchDispatchMode.__enter__`` so that modes get the Python names of devices."""

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


_DEVICE = torch.ops.prim.device.default


def _fake_device_handler(args: Args) -> torch.device:
    """Return a fake tensor's C++ device, for which autograd needs no streams."""
    return cpp_device(fake_tensor._device_handler(args))  # type: ignore[no-any-return]


def _of_fake_tensor(plain: Callable[..., Any]) -> Any:
    @functools.wraps(plain)
    def __torch_dispatch__(
        cls: type, func: Operator, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func is _DEVICE:
            return _fake_device_handler(args)
        return plain(func, types, args, kwargs or {})

    return classmethod(__torch_dispatch__)


def _leaving_out(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that adds the default device, to skip calls with a virtual ``out=``.

    C++ would compare the default device with the C++ device of ``out``.
    """

    def __torch_function__(
        context: DeviceContext, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = kwargs and kwargs.get("out")
        if isinstance(out, torch.Tensor) and out.device.type == context.device.type:
            return func(*args, **(kwargs or {}))
        return plain(context, func, types, args, kwargs)

    return __torch_function__


# Inside torch.func.grad and vmap, C++ wraps each tensor again. The wrapper isn't a virtual tensor,
# and its device is the C++ device.


def _device(plain: Any) -> property:
    """Return the property ``Tensor.device``, extended to these wrappers."""
    get_plain = plain.__get__

    return property(lambda tensor: gpus.shown(get_plain(tensor)), doc=plain.__doc__)


def _new_tensor(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        if type(self) is torch.Tensor and self.device.type == gpus.DEVICE_TYPE:  # a wrapper
            return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})
        return plain(self, data, **options)

    return new_tensor
