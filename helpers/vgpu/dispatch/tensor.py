"""The tensor of a virtual GPU, and what happens when torch computes with it.

A :class:`VirtualTensor` holds a CPU tensor with the values. To C++ it is a tensor without storage
on ``lazy:k``. That device type was chosen because autograd keeps its index (a copy between two
virtual GPUs is differentiated as a copy back) and runs its backward in the CPU's queue, and because
torch ships no kernels for it, so whatever autograd's formulas create there reaches
:func:`dispatch` too. Python shows ``vgpu:k``: the ``device`` property below says so.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from helpers.vgpu.device import generators, gpus
from helpers.vgpu.device.gpus import VirtualGPU
from helpers.vgpu.device.memory import Block
from helpers.vgpu.dispatch import views
from helpers.vgpu.dispatch.device_names import naming_devices
from helpers.vgpu.dispatch.refusals import refuse_tangents, subclass_refused
from helpers.vgpu.dispatch.rules import Rule, rule_for

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore
# Attributes that make a tensor virtual.
HELD = {"_block", "_gpu", "_inner"}
# Attributes that every virtual tensor may have; torch marks a Parameter with the third.
OWN_ATTRIBUTES = {*HELD, "_is_param"}

# Below Python, torch no longer resolves lazy conjugation and negation, but kernels that consist of
# several operators rely on it.
_resolving = torch._C._SetExcludeDispatchKeyGuard  # type: ignore[attr-defined]
_CONJUGATE = torch._C.DispatchKey.Conjugate  # type: ignore[attr-defined]
_NEGATIVE = torch._C.DispatchKey.Negative  # type: ignore[attr-defined]
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView  # type: ignore[attr-defined]

_make_wrapper = torch.Tensor._make_wrapper_subclass
_in_inference_mode = torch.is_inference_mode_enabled
_new = naming_devices(torch.Tensor.new)
set_cpp_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU; made by torch's own functions, never by hand."""

    # No slots: a plain tensor that becomes virtual (data_assignment.py) has none.
    _gpu: VirtualGPU
    _inner: torch.Tensor
    _block: Block | None = None  # of a tensor without values, whose storage is not its own

    # Torch functions run as they are; only the methods below know the virtual device's name.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if len(types) > 1 and not all(issubclass(kind, VirtualTensor) for kind in types):
            return NotImplemented  # a tensor around a virtual one (DTensor) goes first
        return (_interceptor or run)(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu.device

    grad = property(
        torch._C.TensorBase.grad.__get__,  # type: ignore[union-attr]
        naming_devices(torch._C.TensorBase.grad.__set__),  # type: ignore[union-attr]
    )
    tensor_split = naming_devices(torch.Tensor.tensor_split)

    def get_device(self) -> int:
        return self._gpu.index

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """``Tensor.to``; C++ compares devices there, so it must get the ones it knows."""
        if "device" in kwargs:
            kwargs["device"] = cpp_device(kwargs["device"])
        elif args:
            args = (cpp_device(args[0]), *args[1:])
        return super().to(*args, **kwargs)

    def type(  # type: ignore[override]
        self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        if dtype is None and self.layout is torch.sparse_coo:  # C++ has no name for it
            return self._inner.type().replace("torch", f"torch.{gpus.DEVICE_TYPE}", 1)
        if dtype is None:
            return super().type().replace(gpus.CPP_DEVICE_TYPE, gpus.DEVICE_TYPE)
        return super().type(dtype, non_blocking, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise _not_numpy(self.device)

    def __array__(self, dtype: Any = None) -> Any:
        raise _not_numpy(self.device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self._inner.data_ptr()

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
        return _new(self, *args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:  # type: ignore[override]
        if not issubclass(VirtualTensor, cls):
            raise subclass_refused(cls)
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the values: it tells which tensors share memory, but not the device."""
        return self._inner.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if tensor_contents is None and self.layout is torch.strided and self.numel() > 0:
            with torch.no_grad():
                tensor_contents = torch._tensor_str._tensor_str(self._inner, len("tensor("))
        text = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        text = text.replace("Tensor(", "tensor(", 1)
        if isinstance(self, torch.nn.Parameter):
            text = text.removeprefix("Parameter(").removesuffix(")")
            return f"Parameter containing:\n{text}"
        return text

    def __deepcopy__(self, memo: dict) -> "VirtualTensor":
        if id(self) in memo:
            return memo[id(self)]
        if isinstance(self, torch.nn.Parameter):  # as torch's own: no gradient, no attributes
            copied = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad)
            return memo[id(self)]
        with torch.inference_mode(False):  # in it autograd finds no history of a changed view
            is_leaf = self.is_leaf
        if not is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        result = self._copied(memo)
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        others = {name: value for name, value in vars(self).items() if name not in HELD}
        vars(result).update(copy.deepcopy(others, memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def _copied(self, memo: dict) -> "VirtualTensor":
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
        storage: Any = values.untyped_storage()  # count_bytes, for most of what comes here
        if not hasattr(storage, "_vgpu_block"):
            storage._vgpu_block = gpu.memory.allocate(storage.nbytes(), operation)
        tensor = _make_wrapper(
            VirtualTensor,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
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
        for part in sparse_parts(values):
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


# What makes C++ take a tensor for a sparse one; a compressed one must be asked for its layout.
_COO = torch._C.DispatchKeySet(torch._C.DispatchKey.Sparse)
_COMPRESSED = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsr)


def sparse_parts(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a sparse one consists of."""
    if values.layout is torch.sparse_coo:
        return values._indices(), values._values()
    if values.layout in (torch.sparse_csr, torch.sparse_bsr):
        return values.crow_indices(), values.col_indices(), values.values()
    return values.ccol_indices(), values.row_indices(), values.values()


def count_bytes(values: torch.Tensor, gpu: VirtualGPU, operation: str) -> None:
    """Make sure that the storage behind ``values`` has its block on ``gpu``."""
    storage: Any = values.untyped_storage()
    if not hasattr(storage, "_vgpu_block"):
        storage._vgpu_block = gpu.memory.allocate(storage.nbytes(), operation)


def block_of(tensor: VirtualTensor) -> Block:
    """The counted bytes that hold the tensor's values."""
    block = tensor._block
    if block is None:
        values = tensor._inner
        if values.layout is not torch.strided:
            values = sparse_parts(values)[-1]
        count_bytes(values, tensor._gpu, "unknown")
        storage: Any = values.untyped_storage()
        block = storage._vgpu_block
    return block


# What runs an operation in place of ``run``; a recording of virtual time sets it.
_interceptor: Callable[[Any, tuple, dict], Any] | None = None


def set_interceptor(interceptor: Callable[[Any, tuple, dict], Any] | None) -> None:
    """Let ``interceptor`` run each operation; None for nobody."""

    def intercept(func: Any, args: tuple, kwargs: dict) -> Any:
        # It sees a composite operator as the operators that it consists of.
        whole = rule_for(func).composite
        return run(func, args, kwargs) if whole else interceptor(func, args, kwargs)  # type: ignore[misc]

    global _interceptor
    _interceptor = None if interceptor is None else intercept


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Where every operation on virtual tensors arrives."""
    return (_interceptor or run)(func, args, kwargs)


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one operation: check the devices, compute on the values, wrap what comes out."""
    rule = rule_for(func)
    if rule.special is not None:
        return rule.special(func, args, kwargs)
    return _compute(rule, func, args, kwargs)


def compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """``run``, from inside the operator's own handler."""
    return _compute(rule_for(func), func, args, kwargs)


def _compute(rule: Rule, func: Any, args: tuple, kwargs: dict) -> Any:
    inner_args, gpu, mixed = unwrap(args, None, False)
    inner_kwargs = kwargs
    if kwargs:
        values, gpu, mixed = unwrap(kwargs.values(), gpu, mixed)
        inner_kwargs = dict(zip(kwargs, values, strict=True))
    if mixed:
        refuse_tangents((args, *kwargs.values()))
        rule.check(func, args, kwargs)
    if rule.makes_on_device:
        gpu = _set_inner_device(inner_kwargs, gpu)
        if gpu is not None:
            _require_room(inner_args, inner_kwargs, gpu)
    try:
        if rule.plain:
            result = func(*inner_args, **inner_kwargs)
        elif rule.draws and gpu is not None:
            result = generators.draw(rule, func, inner_args, inner_kwargs, gpu)
        elif rule.writes_lists:
            result = counting_versions(func, args, inner_args, inner_kwargs, rule.writes_lists)
        elif rule.convolves and inner_args[0].dtype is torch.float16:
            result = _in_float32(func, inner_args)
        elif rule.conjugates and any(_is_complex(value) for value in inner_args):
            with _resolving(_CONJUGATE, False), _resolving(_NEGATIVE, False):
                result = func(*inner_args, **inner_kwargs)
        else:
            result = func(*inner_args, **inner_kwargs)
    except RuntimeError as error:
        if rule.reshapes:  # it may have done so before it failed
            for argument in _written(rule, args, kwargs):
                refresh(argument, rule.name)
        if gpu is not None:
            _refuse_host_memory(error, gpu)
        raise
    if rule.aliases is not None:
        return _return_arguments(rule, result, args, kwargs, gpu)
    if gpu is not None and type(result) is torch.Tensor:
        return wrap(result, gpu, rule.name)
    return wrap_result(result, gpu, rule.name)


def counting_versions(
    func: Any, args: tuple, inner_args: list, inner_kwargs: dict, positions: Iterable[int]
) -> Any:
    """Run an operator that changes the lists of tensors at ``positions``.

    C++ counts a new version of a single tensor that changes in place, but not of those in a list:
    each takes over what is counted of an alias of its values, which has a version of its own.
    """
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in positions:
        inner_args[position] = [
            values if values.is_inference() else values.data for values in inner_args[position]
        ]
        changed += zip(args[position], inner_args[position], strict=True)
    try:
        with _resolving(_IN_PLACE_OR_VIEW, False):
            return func(*inner_args, **inner_kwargs)
    finally:
        for one, alias in changed:
            if not alias.is_inference():
                torch._C._increment_version([one] * alias._version)  # type: ignore[attr-defined]


def _refuse_host_memory(error: RuntimeError, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError of the GPU where the CPU's allocator had no room for a result."""
    found = _HOST_REFUSAL.search(str(error))
    if found is not None:
        size_bytes = int(found[1])
        gpu.memory.require(size_bytes)
        raise torch.OutOfMemoryError(gpu.memory.out_of_host_memory(size_bytes)) from None


_HOST_REFUSAL = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")


def _in_float32(func: Any, inner_args: list) -> Any:
    """A float16 convolution, summed in float32 as a GPU does; the CPU's own takes 50 times as long."""

    def cast(values: Any, dtype: torch.dtype, wider: torch.dtype) -> list:
        return [
            value.to(wider) if isinstance(value, torch.Tensor) and value.dtype is dtype else value
            for value in values
        ]

    result = func(*cast(inner_args, torch.float16, torch.float32))
    if isinstance(result, torch.Tensor):
        return result.to(torch.float16)
    return tuple(cast(result, torch.float32, torch.float16))


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def unwrap(
    values: Iterable, gpu: VirtualGPU | None, mixed: bool
) -> tuple[list, VirtualGPU | None, bool]:
    """The values with CPU tensors in place of virtual ones, the GPU, and whether others mix in.

    ``gpu`` and ``mixed`` are what earlier values gave. ``mixed`` becomes True where tensors of
    another device, virtual or not, are among the values.
    """
    inner = []
    for value in values:
        kind = type(value)
        if kind is VirtualTensor:
            if value._gpu is not gpu:
                mixed = mixed or gpu is not None
                gpu = value._gpu
            value = value._inner
        elif kind is list or kind is tuple:
            value, gpu, mixed = unwrap(value, gpu, mixed)
        elif isinstance(value, torch.Tensor):
            mixed = True
        inner.append(value)
    return inner, gpu, mixed


def _set_inner_device(inner_kwargs: dict, gpu: VirtualGPU | None) -> VirtualGPU | None:
    """Turn ``device=`` into the CPU's; returns the GPU of the result, None for a real device."""
    device = inner_kwargs.get("device")
    if device is None:
        return gpu
    target = gpus.resolve(device)
    if target is not None:
        inner_kwargs["device"] = "cpu"
        inner_kwargs.pop("pin_memory", None)
    return target


def _require_room(inner_args: list, inner_kwargs: dict, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError before the CPU is asked for room that the GPU does not have."""
    # Factories start with the size, or with a tensor to take after and perhaps the size.
    first = size = inner_args[0] if inner_args else None
    if isinstance(first, torch.Tensor) and len(inner_args) > 1:
        size = inner_args[1]
    if not isinstance(size, list) or not all(isinstance(number, int) for number in size):
        return
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.get_default_dtype()
    dtype = inner_kwargs.get("dtype") or dtype
    gpu.memory.require(math.prod(size) * dtype.itemsize)


def wrap_result(result: Any, gpu: VirtualGPU | None, operation: str) -> Any:
    """Wrap each tensor of a result; numbers, and everything on a real device, stay as they are."""
    if isinstance(result, torch.Tensor):
        return result if gpu is None else wrap(result, gpu, operation)
    if isinstance(result, list | tuple):
        return type(result)([wrap_result(item, gpu, operation) for item in result])
    return result


def _return_arguments(
    rule: Rule, result: Any, args: tuple, kwargs: dict, gpu: VirtualGPU | None
) -> Any:
    """The results of an in-place or ``out=`` call: the very arguments that it wrote to."""
    assert rule.aliases is not None
    several = len(rule.aliases) > 1
    outputs = []
    for alias, item in zip(rule.aliases, result if several else (result,), strict=True):
        if alias is None:
            outputs.append(wrap_result(item, gpu, rule.name))
            continue
        argument = _argument(alias, args, kwargs)
        if rule.reshapes or argument._inner.layout is not torch.strided:
            refresh(argument, rule.name)
        outputs.append(argument)
    return tuple(outputs) if several else outputs[0]


def _argument(alias: tuple[int, str], args: tuple, kwargs: dict) -> Any:
    position, name = alias
    return args[position] if position < len(args) else kwargs[name]


def _written(rule: Rule, args: tuple, kwargs: dict) -> list[VirtualTensor]:
    """The virtual tensors that a call writes to and hands back."""
    arguments = [_argument(alias, args, kwargs) for alias in rule.aliases or () if alias]
    return [argument for argument in arguments if isinstance(argument, VirtualTensor)]


def refresh(tensor: VirtualTensor, operation: str) -> None:
    """Show the size, strides and bytes that the values have after an in-place operation."""
    values = tensor._inner
    for part in (values,) if values.layout is torch.strided else sparse_parts(values):
        storage: Any = part.untyped_storage()
        count_bytes(part, tensor._gpu, operation)
        try:
            storage._vgpu_block.resize(storage.nbytes(), operation)
        except torch.OutOfMemoryError:
            _shrink_back(tensor, part)
            raise
    set_cpp_data(tensor, wrap(values, tensor._gpu, operation))


def _shrink_back(tensor: VirtualTensor, part: torch.Tensor) -> None:
    """Undo the growth of a tensor that does not fit: its size and its bytes are those from before."""
    storage: Any = part.untyped_storage()
    if part is tensor._inner:
        part.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    storage.resize_(storage._vgpu_block.size_bytes)
