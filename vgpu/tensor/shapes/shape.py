"""A tensor that is only a shape: it has a size, strides, a type, a device and counted bytes.

What it has no values for raises a :class:`NoValueError`.
"""

import weakref
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from vgpu.memory.blocks import Block
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator
from vgpu.tensor.tensor import VirtualTensor, block_of, set_cpp_data
from vgpu.time import signatures

_make_wrapper = torch.Tensor._make_wrapper_subclass
_in_inference_mode = torch.is_inference_mode_enabled
_KEYS_ON_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_KEYS_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class NoValueError(RuntimeError):
    """A value was asked of a tensor that is only a shape."""


class Host:
    """Stands in for a GPU in a shape that lies on the host; its bytes are not counted."""

    index = -1
    device = cpp_device = torch.device("cpu")


HOST = Host()
Place = VirtualGPU | Host


def _not_ready(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    raise AssertionError("vgpu.tensor.shapes.operations runs operations, and is not imported")


# Runs each operation on shapes.
runner: Handler = _not_ready


def run_with(handler: Handler) -> None:
    """Let ``handler`` run each operation on shapes."""
    global runner
    runner = handler


class ShapeTensor(VirtualTensor):
    """A tensor without values, on a virtual GPU or on the host."""

    _gpu: Place  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if len(types) > 1 and around_shapes(types):
            return NotImplemented
        return runner(func, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        """One for each block, with its rounded size: it tells which shapes share memory.

        The tensor inside has none of its own, since all shapes of a kind share it.
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

    def _copied(self, memo: dict[int, Any]) -> "ShapeTensor":
        block = self._block
        base: ShapeTensor | None = None if block is None else memo.get(id(block))
        result = make(Output.of(self._inner), self._gpu, "deepcopy", base)
        if block is not None:
            memo.setdefault(id(block), result)
        return result


def around_shapes(types: tuple[type, ...]) -> bool:
    """Whether there is a tensor around shapes, such as DTensor: it comes back with them."""
    for kind in types:
        if (
            kind is not ShapeTensor  # asked first: nearly all are, and every call comes here
            and not issubclass(kind, VirtualTensor)
            and getattr(kind, "__torch_dispatch__", None) is not _NO_DISPATCH
        ):
            return True
    return False


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def is_shape(value: object) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, ShapeTensor)


class Output(NamedTuple):
    """One tensor that an operation makes, but for its device."""

    meta: torch.Tensor  # the interned one
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "Output":
        meta = signatures.interned(tensor)
        offset = int(meta.storage_offset())
        storage_bytes = meta.untyped_storage().nbytes()
        return Output(meta, meta.size(), meta.stride(), offset, meta.dtype, storage_bytes)


def make(
    output: Output, gpu: Place, operation: str, base: VirtualTensor | None = None
) -> ShapeTensor:
    """A shape on ``gpu``; a view of ``base`` counts no bytes of its own."""
    if base is not None and (inference := base.is_inference()) is not _in_inference_mode():
        # A view of a tensor that was made outside of inference mode is one from outside as well.
        with torch.inference_mode(inference):
            return make(output, gpu, operation, base)
    meta, size, stride, offset, dtype, storage_bytes = output
    made = _make_wrapper(
        ShapeTensor,
        size,
        strides=stride,
        storage_offset=offset or None,  # 0 unless given, and giving it takes time
        dtype=dtype,
        device=gpu.cpp_device,
        _extra_dispatch_keys=_KEYS_ON_HOST if gpu is HOST else _KEYS_ON_GPU,
    )
    if dtype.is_complex and meta.is_conj():
        torch._C._set_conj(made, True)
    made._inner = meta
    made._gpu = gpu
    if isinstance(gpu, VirtualGPU):
        made._block = (
            gpu.memory.allocate(storage_bytes, operation) if base is None else block_of(base)
        )
    return made


def become(argument: ShapeTensor, output: Output, operation: str) -> None:
    """Give a shape that an operation changed in place its new size, strides and bytes.

    Memory that is large enough stays as it is; ``set_`` gives it other memory.
    """
    block: Block | None = argument._block
    if block is not None and (output.storage_bytes > block.size_bytes or operation == "set_"):
        block.resize(output.storage_bytes, operation)
    set_cpp_data(argument, make(output, argument._gpu, operation, argument))
    argument._inner = output.meta


def no_value(asked: torch.Tensor, operation: str) -> NoValueError:
    name = "item()" if operation == "_local_scalar_dense" else operation
    return NoValueError(
        f"{name} needs the values of a tensor of size {list(asked.size())} on {asked.device}, but "
        "it is only a shape: it was made or moved in a vgpu.shapes_only() block, where nothing is "
        "computed. Ask for sizes, bytes and virtual time there, or run without shapes_only() to "
        "get values."
    )
