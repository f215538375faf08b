"""The tensor of a virtual GPU: what it shows, and how it is made of its values.

A :class:`VirtualTensor` holds a CPU tensor with the values. To C++ it is a tensor without storage
on ``lazy:k``. That device type was chosen because autograd keeps its index (a copy between two
virtual GPUs is differentiated as a copy back) and runs its backward in the CPU's queue, and because
torch ships no kernels for it, so that whatever autograd's formulas create there is dispatched to
operations.py as well. Python shows ``vgpu:k``: the ``device`` property below says so.
"""

import builtins
import copy
from typing import Any

import torch
from numpy.typing import NDArray

from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor import views
from vgpu.tensor.device_names import naming_devices
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator
from vgpu.tensor.refusals import subclass_refused

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
# Attributes that make a tensor virtual.
HELD = {"_block", "_given_data", "_gpu", "_inner"}
# Attributes that any virtual tensor may have; torch marks a Parameter with the last.
OWN_ATTRIBUTES = {*HELD, "_is_param"}

_make_wrapper = torch.Tensor._make_wrapper_subclass
_in_inference_mode = torch.is_inference_mode_enabled
_new = naming_devices(torch.Tensor.new)
set_cpp_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


def _not_ready(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    raise AssertionError("vgpu.tensor.operations runs operations, and is not imported")


# Runs each operation on virtual tensors.
runner: Handler = _not_ready


def run_with(handler: Handler) -> None:
    """Let ``handler`` run each operation on virtual tensors."""
    global runner
    runner = handler


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU; made by torch's own functions, never by hand."""

    # No slots: a plain tensor that becomes virtual (data_assignment.py) has none.
    _gpu: VirtualGPU
    _inner: torch.Tensor
    _block: Block | None = None  # of a tensor without values, whose storage is not its own
    _given_data = False  # whether .data was assigned: earlier views lie in other memory

    # Torch functions run as they are; only the methods below know the virtual device's name.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if len(types) > 1 and not all(issubclass(kind, VirtualTensor) for kind in types):
            return NotImplemented  # a tensor around a virtual one (DTensor) goes first
        return runner(func, args, kwargs or {})

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
        """``Tensor.to``; C++ compares devices there, so it must get the ones it knows."""
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
        if dtype is None and self.layout is not torch.strided:  # C++ has no name for it
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
        """FSDP1 calls it below dispatch, where C++ would find no kernel for its device."""
        func = torch.ops.aten.record_stream.default
        self.__torch_dispatch__(func, (type(self),), (self, stream))

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """The old constructor; C++ forgets the index there, and has none for sparse tensors."""
        if self.layout is torch.sparse_coo and args:
            return torch.sparse_coo_tensor(
                *args, dtype=self.dtype, device=self.device, check_invariants=False
            )
        if not kwargs and all(type(size) is int for size in args):
            return self.new_empty(args or (0,))
        if not kwargs and len(args) == 1 and isinstance(args[0], list | tuple):
            sizes = isinstance(args[0], torch.Size)
            return self.new_empty(args[0]) if sizes else self.new_tensor(args[0])
        made: torch.Tensor = _new(self, *args, **kwargs)
        return made

    def as_subclass(self, cls: builtins.type[torch.Tensor]) -> "VirtualTensor":  # type: ignore[override]
        if not issubclass(VirtualTensor, cls):
            raise subclass_refused(cls)
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the values: it shows which tensors share memory, but not on which device."""
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
        found: torch.Tensor | None = memo.get(id(self))
        if found is not None:
            return found
        if isinstance(self, torch.nn.Parameter):  # as torch's own: no gradient, no attributes
            values = self.detach().clone(memory_format=torch.preserve_format)
            copied = memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
            return copied
        with torch.inference_mode(False):  # in it autograd finds no history of a changed view
            is_leaf = self.is_leaf
        if not is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment.  If you were attempting to deepcopy a module, this may be "
                "because of a torch.nn.utils.weight_norm usage, "
                "see https://github.com/pytorch/pytorch/pull/103001"
            )
        result = self._copied(memo)
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        others = {name: value for name, value in vars(self).items() if name not in HELD}
        vars(result).update(copy.deepcopy(others, memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def _copied(self, memo: dict[int, Any]) -> "VirtualTensor":
        """A copy without a gradient, of memory that is copied once for all tensors that share it."""
        return wrap(copy.deepcopy(self._inner, memo), self._gpu, "deepcopy")

    def __format__(self, format_spec: str) -> str:
        return self.item().__format__(format_spec) if self.dim() == 0 else repr(self)


for name in views.RESHAPING:
    setattr(VirtualTensor, name, views.keeping_views(getattr(torch.Tensor, name)))

# Printing breaks lines by the width of the type's name; torch's own is six letters.
VirtualTensor.__name__ = "Tensor"


def _not_numpy(device: torch.device) -> TypeError:
    return TypeError(
        f"can't convert {device} device type tensor to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first."
    )


def cpp_device(device: Any) -> Any:
    """``device`` as C++ knows it, if it means a virtual GPU; anything else unchanged."""
    if isinstance(device, str) and device.startswith(gpus.DEVICE_TYPE):
        device = torch.device(device)
    elif type(device) is int:
        return gpus.by_index(device).cpp_device
    if isinstance(device, torch.device):
        gpu = gpus.resolve(device)
        if gpu is not None:
            return gpu.cpp_device
    return device


def wrap(values: torch.Tensor, gpu: VirtualGPU, operation: str) -> VirtualTensor:
    """Put ``values`` on ``gpu``: counts its storage there, if it is not counted yet.

    Raises torch.OutOfMemoryError where the storage does not fit.
    """
    inference = values.is_inference()
    if inference is not _in_inference_mode():
        # A view of a tensor that was made outside of inference mode is one from outside as well.
        with torch.inference_mode(inference):
            return wrap(values, gpu, operation)
    layout = values.layout
    if layout is torch.strided:
        storage = values.untyped_storage()  # count_bytes, for most of what comes here
        if not hasattr(storage, "_vgpu_block"):
            storage._vgpu_block = gpu.memory.allocate(storage.nbytes(), operation)  # type: ignore[attr-defined]
        tensor = _make_wrapper(
            VirtualTensor,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset() or None,  # giving 0 takes time
            dtype=values.dtype,
            device=gpu.cpp_device,
            _extra_dispatch_keys=_AUTOCAST,
        )
        # C++ resolves lazy conjugation and negation before it calls dispatch, if it knows of them.
        if values.is_conj():
            torch._C._set_conj(tensor, True)
        if values.is_neg():
            torch._C._set_neg(tensor, True)
    else:
        for part in strided_parts(values):
            count_bytes(part, gpu, operation)
        tensor = _make_wrapper(
            VirtualTensor,
            values.size(),
            dtype=values.dtype,
            device=gpu.cpp_device,
            dispatch_layout=layout is not torch.sparse_coo,
            _extra_dispatch_keys=_AUTOCAST | (_COO if layout is torch.sparse_coo else _COMPRESSED),
        )
    tensor._inner = values
    tensor._gpu = gpu
    return tensor


# Keys that mark a tensor as sparse for C++, which asks a compressed one for its layout.
_COO = torch._C.DispatchKeySet(torch._C.DispatchKey.Sparse)
_COMPRESSED = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsr)


def strided_parts(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a tensor consists of: itself, or what a sparse one holds."""
    if values.layout is torch.strided:
        return (values,)
    if values.layout is torch.sparse_coo:
        return values._indices(), values._values()
    if values.layout in (torch.sparse_csr, torch.sparse_bsr):
        return values.crow_indices(), values.col_indices(), values.values()
    return values.ccol_indices(), values.row_indices(), values.values()


def count_bytes(values: torch.Tensor, gpu: VirtualGPU, operation: str) -> Block:
    """The block of the storage behind ``values``; a new one on ``gpu`` where it has none yet."""
    storage = values.untyped_storage()
    block: Block | None = getattr(storage, "_vgpu_block", None)
    if block is None:
        block = gpu.memory.allocate(storage.nbytes(), operation)
        storage._vgpu_block = block  # type: ignore[attr-defined]
    return block


def block_of(tensor: VirtualTensor) -> Block:
    """The counted bytes that hold the tensor's values."""
    if tensor._block is not None:
        return tensor._block
    values = tensor._inner
    part = values if values.layout is torch.strided else strided_parts(values)[-1]
    return count_bytes(part, tensor._gpu, "unknown")
