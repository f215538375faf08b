"""What dispatch must know about an operator, read once from its schema."""

from collections.abc import Callable
from typing import Any

import torch

from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, overloads
from vgpu.tensor.same_device import check_for

# In-place operators that may change the size, the strides or the storage of their argument, besides
# those that carry torch's own tag for it and those that write to ``out=``.
_RESIZING = {"resize_", "resize_as_", "set_", "resize", "swap_tensors", "addbmm_"}


class Rule:
    """How to treat the calls of one operator."""

    __slots__ = (
        "aliases",
        "check",
        "conjugates",
        "convolves",
        "divides",
        "draws",
        "func",
        "makes_on_device",
        "name",
        "parts",
        "plain",
        "reshapes",
        "special",
        "with_generator",
        "writes_lists",
    )

    def __init__(self, func: Operator, special: Handler | None) -> None:
        schema = func._schema
        self.func = func
        self.name = schema.name.partition("::")[2]
        self.special = special
        # Whether a call is several operators on CUDA, and what runs them; None: it never is.
        self.divides: Condition | None = None
        self.parts: Handler = _not_in_parts
        if special is None:
            self._read_parts(func)
        self.check = check_for(func)
        # For each result, the argument that it is (position, name), or None for a new tensor.
        aliases = tuple(_written_argument(schema, result) for result in schema.returns)
        self.aliases = aliases if any(aliases) else None
        # The arguments whose size may have changed afterwards.
        writes_out = any(argument.is_out for argument in schema.arguments)
        resizes = self.name in _RESIZING or torch.Tag.inplace_view in func.tags
        self.reshapes = writes_out or resizes
        # The lists of tensors that it changes, whose versions the CPU's kernels would count.
        self.writes_lists = tuple(
            position
            for position, argument in enumerate(schema.arguments)
            if self.name.startswith("_foreach_")
            and argument.alias_info is not None
            and argument.alias_info.is_write
        )
        # The same operator with a generator among its arguments, if it draws random numbers.
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.with_generator = _with_generator(func) if self.draws else None
        # A kernel that consists of several operators may conjugate lazily between them.
        self.conjugates = torch.Tag.pointwise not in func.tags
        self.convolves = self.name in ("convolution", "convolution_backward") and not writes_out
        # None of the above: called on the values as it is.
        self.plain = not (self.draws or self.writes_lists or self.convolves or self.conjugates)
        self.makes_on_device = any(argument.name == "device" for argument in schema.arguments)

    def _read_parts(self, func: Operator) -> None:
        if func.name() in _parts:
            self.divides, self.parts = _parts[func.name()]
        elif func._schema.name.partition("::")[0] not in TORCHS_OWN:
            # Its kernel for a GPU may be a user's Python (custom.py).
            self.special = self.parts = _run_foreign
            self.divides = lambda args, kwargs: gpu_kernel(func) is not None
        elif is_composite(func):
            # In inference mode autograd is skipped, and a composite operator arrives whole.
            self.divides, self.parts = always, decompose
        elif func.name() in _OF_SEVERAL:
            self.divides, self.parts = always, _run_explicit
        elif self.name.startswith("_foreach_"):
            # One kernel for lists of dense tensors on one device; no other lists are fit for it.
            self.divides, self.parts = not_in_one_kernel, one_by_one


# Whether a call with these arguments is several operators on CUDA.
Condition = Callable[[Args, Kwargs], bool]


def always(args: Args, kwargs: Kwargs) -> bool:
    return True


def _not_in_parts(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    raise AssertionError(f"{func.name()} is one operator")


# The namespaces of operators that torch and its packages define; each is one kernel of a GPU.
TORCHS_OWN = {
    *("aten", "c10d", "c10d_functional", "coor", "debug_mode_ops", "debugprims"),
    *("export", "flex_gemm", "flex_lib", "fsdp", "image", "inductor", "inductor_prims"),
    *("mempool", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx"),
    *("onnx_symbolic", "pippy", "prim", "prims", "profiler", "quantization"),
    *("quantized", "rngprims", "sparse", "static_runtime", "streams", "symm_mem"),
    *("torchvision", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"),
    *("_inductor_test", "_native", "_native_aot", "_quantized", "_test"),
}


def is_composite(func: Operator) -> bool:
    """Whether C++ makes the operator of others, for every device alike.

    Not so silu_backward, for which CPU and CUDA have a kernel each. Constructors of sparse tensors
    ask for a device that C++ has an allocator for.
    """
    composite = _has_kernel(func.name(), _COMPOSITE) and not _has_kernel(func.name(), _CPU)
    return composite and not func._schema.name.startswith(("aten::_sparse_", "aten::sparse_"))


# What C++ makes of other operators below autograd, for every device alike, with tensors between them
# that take room (tests/vgpu/tensor/test_parts.py).
_OF_SEVERAL = {
    f"aten::{name}"
    for name in (
        *("_euclidean_dist", "_safe_softmax", "affine_grid_generator", "allclose"),
        *("binary_cross_entropy_with_logits", "dist", "isinf", "ldexp.Tensor", "mvlgamma"),
        *("soft_margin_loss", "soft_margin_loss.out"),
        *("soft_margin_loss_backward", "soft_margin_loss_backward.grad_input"),
    )
}


def _run_explicit(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    return func._op_dk(_EXPLICIT, *args, **kwargs)


def gpu_kernel(func: Operator) -> str | None:
    """The key of the Python kernel that a GPU runs for an operator that torch does not have itself.

    None where the kernels are in C++. NotImplementedError, as on CUDA, where Python has one for
    other devices only. Asked at each call: kernels may be registered at any time.
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
        f"Register its kernel for virtual GPUs, such as @torch.library.register_kernel("
        f"'{func.name()}', 'vgpu'), or one for all devices (custom_op without device_types; "
        "CompositeExplicitAutograd in a Library)"
    )


# In the order in which C++ looks; the last is what a Library registers without a key.
_FOR_GPUS = (
    "PrivateUse1",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "",
)


def decompose(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite operator as C++ does for every device but CUDA.

    In inference mode, a view of a tensor from outside shares its version counter; outside, a tensor
    made in inference mode must not be changed. C++ enforces both, for the operator or its parts.
    """
    inference = torch.is_inference_mode_enabled() or any(
        isinstance(value, torch.Tensor) and value.is_inference() for value in args
    )
    if not inference or _has_kernel(func.name(), _IN_PLACE_OR_VIEW):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    with _excluding(_IN_PLACE_OR_VIEW, False):
        return func._op_dk(_COMPOSITE, *args, **kwargs)


def not_in_one_kernel(args: Args, kwargs: Kwargs) -> bool:
    """Whether the lists of a foreach operator hold a sparse tensor, or lie on several devices."""
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
    """Run a foreach operator tensor by tensor, as CUDA does with what has no kernel for lists."""
    with _excluding(_IN_PLACE_OR_VIEW, False):  # each changed tensor counts its version
        return func._op_dk(_EXPLICIT, *args, **kwargs)


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_CPU = torch._C.DispatchKey.CPU
_excluding = torch._C._SetExcludeDispatchKeyGuard
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def _written_argument(schema: Any, result: Any) -> tuple[int, str] | None:
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set == result.alias_info.before_set:
            return position, argument.name
    return None


def _with_generator(func: Operator) -> Operator | None:
    """The overload of ``func`` that takes a generator beside the same arguments, or None."""
    wanted = {argument.name for argument in func._schema.arguments} | {"generator"}
    for overload in (func, *overloads(func._overloadpacket)):
        if {argument.name for argument in overload._schema.arguments} == wanted:
            return overload
    return None


# By id: hashing an operator is slow. A rule keeps its operator, and so the id, alive.
_rules: dict[int, Rule] = {}
_handlers: dict[str, Handler] = {}
_parts: dict[str, tuple[Condition, Handler]] = {}
_run_foreign: Handler = _not_in_parts


def use_parts(parts: dict[str, tuple[Condition, Handler]]) -> None:
    """Let each of ``parts`` run the overload whose name is its key, where its condition holds.

    A handler calls the operators that the call is on CUDA.
    """
    _parts.update(parts)
    _rules.clear()


def use_handlers(handlers: dict[str, Handler]) -> None:
    """Let each of ``handlers`` run the operator whose name is its key, with all overloads.

    A key "name.overload" is for that one alone.
    """
    _handlers.update(handlers)
    _rules.clear()


def use_for_foreign(handler: Handler) -> None:
    """Let ``handler`` run the operators that torch does not have itself."""
    global _run_foreign
    _run_foreign = handler
    _rules.clear()


def rule_for(func: Operator) -> Rule:
    """The rule of an operator; made at its first call."""
    rule = _rules.get(id(func))
    if rule is None:
        special = _handlers.get(func.name()) or _handlers.get(func._schema.name)
        rule = _rules[id(func)] = Rule(func, special)
    return rule
