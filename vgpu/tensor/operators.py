"""Types and helpers for torch's operators, including composite ones, which call other operators.

Composite operators are decomposed by C++ or by the user's Python code. Each part goes through
``run``, since every part takes time, and intermediate tensors need memory. Operators that are
composite only on CUDA are in parts.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Arguments and results of operators have arbitrary types.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

Operator = torch._ops.OpOverload

# A function that runs calls to an operator.
Handler = Callable[[Operator, Args, Kwargs], Any]


def named_arguments(func: Operator, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return the arguments of a call by name, without defaults."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def argument(place: tuple[int, str], args: Args, kwargs: Kwargs) -> Any:
    """Return the argument at a position, or by name if it was passed as a keyword."""
    position, name = place
    return args[position] if position < len(args) else kwargs[name]


def overloads(packet: Any) -> list[Operator]:
    """Return the overloads of an operator packet, such as ``torch.ops.aten.add``."""
    return [getattr(packet, name) for name in packet.overloads()]


def operator_of_aten(name: str) -> Operator:
    """Return one of aten's operators by "name" or "name.overload"."""
    packet, _, overload = name.partition(".")
    func: Operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return func


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_excluding = torch._C._SetExcludeDispatchKeyGuard
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_CPU = torch._C.DispatchKey.CPU
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


# Operators that C++ decomposes, for every device


def is_composite(func: Operator) -> bool:
    """Whether C++ decomposes the operator into others, in the same way for every device.

    Exceptions: silu_backward, since CPU and CUDA have their own kernels, and constructors of sparse tensors,
    which need a device with a C++ allocator.
    """
    composite = _has_kernel(func.name(), _COMPOSITE) and not _has_kernel(func.name(), _CPU)
    return composite and not func._schema.name.startswith(("aten::_sparse_", "aten::sparse_"))


def decompose(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite operator as C++ does.

    In inference mode, where autograd is skipped, the operator is dispatched as a whole. In that
    mode, a view of a normal tensor shares the tensor's version counter; outside it, an inference
    tensor must not be modified. C++ enforces both, for the operator or for its parts.
    """
    inference = torch.is_inference_mode_enabled() or any(
        isinstance(value, torch.Tensor) and value.is_inference() for value in args
    )
    if not inference or _has_kernel(func.name(), _IN_PLACE_OR_VIEW):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    with _excluding(_IN_PLACE_OR_VIEW, False):
        return func._op_dk(_COMPOSITE, *args, **kwargs)


# Operators that C++ decomposes below autograd, in the same way for every device, with intermediate tensors
# that need memory (tests/vgpu/tensor/test_parts.py).
OF_SEVERAL = {
    f"aten::{name}"
    for name in (
        *("_euclidean_dist", "_safe_softmax", "affine_grid_generator", "allclose"),
        *("binary_cross_entropy_with_logits", "dist", "isinf", "ldexp.Tensor", "mvlgamma"),
        *("soft_margin_loss", "soft_margin_loss.out"),
        *("soft_margin_loss_backward", "soft_margin_loss_backward.grad_input"),
    )
}


def run_explicit(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run one of ``OF_SEVERAL``."""
    return func._op_dk(_EXPLICIT, *args, **kwargs)


def not_in_one_kernel(args: Args, kwargs: Kwargs) -> bool:
    """Whether a foreach call's lists contain a sparse tensor or tensors on different devices."""
    device = None
    for items in args:
        if isinstance(items, list | tuple):
            for item in items:
                if isinstance(item, torch.Tensor):
                    if item.layout is not torch.strided or device not in (None, item.device):
                        return True
                    device = item.device
    return False


def one_by_one(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run a foreach operator tensor by tensor, as CUDA's slow path does."""
    with _excluding(_IN_PLACE_OR_VIEW, False):  # increments the version of each modified tensor
        return func._op_dk(_EXPLICIT, *args, **kwargs)


# Custom operators come from torch.library.custom_op, Library or extensions. A Python kernel is
# called with virtual tensors, as it would be with a GPU's tensors: it sees the virtual device,
# where it computes, draws random numbers and allocates memory.

# The namespaces of operators from torch and its packages; each operator is one kernel on a GPU.
TORCHS_OWN = {
    *("aten", "c10d", "c10d_functional", "coor", "debug_mode_ops", "debugprims"),
    *("export", "flex_gemm", "flex_lib", "fsdp", "image", "inductor", "inductor_prims"),
    *("mempool", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx"),
    *("onnx_symbolic", "pippy", "prim", "prims", "profiler", "quantization"),
    *("quantized", "rngprims", "sparse", "static_runtime", "streams", "symm_mem"),
    *("torchvision", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"),
    *("_inductor_test", "_native", "_native_aot", "_quantized", "_test"),
}


def python_kernel(func: Operator) -> str | None:
    """Return the dispatch key of the Python kernel that a GPU runs for a custom operator.

    Returns None if the kernels are in C++ (the CPU's then runs on the values) or if the operator
    wasn't defined in Python with torch.library. Raises NotImplementedError, as on CUDA, if there
    are only Python kernels for other devices. The result isn't cached, since kernels can be
    registered at any time.
    """
    namespace, _, name = func.name().partition("::")
    prefix = f"{namespace}/{name}/"
    registered: set[str] = torch.library._impls
    for key in _FOR_GPUS:
        if prefix + key in registered:
            return key or "CompositeImplicitAutograd"
    defined_here = func.name() in torch.library._defs
    in_cpp = any(
        _has_kernel(func.name(), key) and prefix + key not in registered
        for key in ("CPU", *_FOR_GPUS[:-1])
    )
    if in_cpp or not defined_here:
        return None
    found = sorted(key.removeprefix(prefix) for key in registered if key.startswith(prefix))
    raise NotImplementedError(
        f"Could not run '{func.name()}' with arguments from the 'VGPU' backend. This could be "
        "because the operator doesn't exist for this backend. "
        f"'{func.name()}' is only available for these backends: [{', '.join(found)}].\n"
        f"Register a kernel for virtual GPUs, for example with @torch.library.register_kernel("
        f"'{func.name()}', 'vgpu'), or one for all devices (custom_op without device_types; "
        "CompositeExplicitAutograd in a Library)"
    )


# In the order in which C++ looks them up; the last is for a Library's kernels without a key.
_FOR_GPUS = (
    "PrivateUse1",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "",
)


def is_foreign_in_parts(func: Operator) -> bool:
    """Whether a GPU runs a custom operator as calls to other operators."""
    return python_kernel(func) is not None or is_composite(func)


def run_foreign(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator for which ``is_foreign_in_parts`` returns True."""
    key = python_kernel(func)
    if key is None:
        return decompose(func, args, kwargs)
    with _as_called(func):
        return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


@contextmanager
def _as_called(func: Operator) -> Iterator[None]:
    """Restore the C++ dispatch state of a kernel on a GPU, with autocast and view tracking.

    Python dispatch has disabled both. Autograd stays disabled if the operator has its own formula;
    otherwise it differentiates the parts of the kernel.
    """
    includes = torch._C._dispatch_tls_local_include_set()
    excludes = torch._C._dispatch_tls_local_exclude_set()
    if excludes.has(torch._C.DispatchKey.PythonTLSSnapshot):
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            excludes = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(includes, excludes):
        if any(_has_kernel(func.name(), key) for key in ("Autograd", "AutogradLazy")):
            with torch._C._AutoDispatchBelowAutograd():
                yield
        else:
            yield
