"""torch's operators: composite ones, which call others, and a record for every operator.

Composite operators are decomposed by C++ or by the user's Python code. Each part goes through
``run``, since every part takes time, and intermediate tensors need memory. Operators that are
composite only on CUDA are in parts.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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

    Exceptions: silu_backward, since CPU and CUDA have their own kernels, and constructors of sparse
    tensors, which need a device with a C++ allocator.
    """
    composite = _has_kernel(func.name(), _COMPOSITE) and not _has_kernel(func.name(), _CPU)
    return composite and not func._schema.name.startswith(("aten::_sparse_", "aten::sparse_"))


def decompose(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite operator as C++ does.

    In inference mode, where autograd is skipped, the operator is dispatched as a whole. In that
    mode, a view of a normal tensor shares the tensor's version counter; outside it, an inference
    tensor must not be modified. C++ enforces both rules, for the operator or for its parts.
    """
    inference = torch.is_inference_mode_enabled() or any(
        isinstance(value, torch.Tensor) and value.is_inference() for value in args
    )
    if not inference or _has_kernel(func.name(), _IN_PLACE_OR_VIEW):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    with _excluding(_IN_PLACE_OR_VIEW, False):
        return func._op_dk(_COMPOSITE, *args, **kwargs)


# Operators that C++ decomposes below autograd, in the same way for every device, with intermediate
# tensors that need memory (tests/vgpu/tensor/test_parts.py).
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


# Records: one per operator, created once from its schema and the registered handlers


# Returns whether a call with these arguments runs multiple operators on CUDA.
Condition = Callable[[Args, Kwargs], bool]
# The dispatch mode of the shapes_only() block that a call came through; disabled during the call.
ShapesMode = AbstractContextManager[object]
ShapeHandler = Callable[[Operator, Args, Kwargs, ShapesMode], Any]

# The keys are "name", for all overloads of an operator, or "name.overload" for one of them.
_handlers: dict[str, Handler] = {}
_shape_handlers: dict[str, ShapeHandler] = {}
_parts: dict[str, tuple[Condition, Handler]] = {}
_recording_themselves: set[str] = set()


def handler(*names: str, records_itself: bool = False) -> Callable[[Handler], Any]:
    """Decorate the function that runs the operators ``names`` on tensors with values.

    With ``records_itself``, the function notifies the recording; otherwise ``run`` records one
    kernel.
    """

    def register(function: Handler) -> Any:
        _handlers.update(dict.fromkeys(names, function))
        _recording_themselves.update(names if records_itself else ())
        _read_again()
        return function

    return register


def shape_handler(*names: str) -> Callable[[ShapeHandler], ShapeHandler]:
    """Decorate the function that runs and records the operators ``names`` on shapes.

    Results of other operators are looked up by signature, even if they have a handler for values.
    """

    def register(function: ShapeHandler) -> ShapeHandler:
        _shape_handlers.update(dict.fromkeys(names, function))
        _read_again()
        return function

    return register


def always(args: Args, kwargs: Kwargs) -> bool:
    return True


def in_parts(*names: str, when: Condition = always) -> Callable[[Handler], Handler]:
    """Decorate the function that runs the operators ``names`` in parts if ``when(args, kwargs)``.

    The function calls the operators that make up the call on CUDA, each of which goes through
    ``run``. A name without an overload refers only to the overload "default".
    """

    def register(function: Handler) -> Handler:
        _parts.update(dict.fromkeys(names, (when, function)))
        _read_again()
        return function

    return register


# Operators whose second argument is a list of indices: integers or masks.
INDEXING = {
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
}
_MASKS = (torch.bool, torch.uint8)

# In-place operators that may change the size, strides or storage of their argument, in addition to
# ``out=`` variants and those that torch tags ``inplace_view``.
_RESIZING = {"resize_", "resize_as_", "set_", "resize", "swap_tensors", "addbmm_"}

# Operators, in addition to views, that launch no kernel on a GPU: they allocate or free memory, or
# query a tensor's metadata.
_ALLOCATES = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
}
_FREE = _ALLOCATES | {
    *("_assert_tensor_metadata", "is_pinned", "is_same_size", "is_set_to", "layout"),
    "record_grad_output_stream",  # FSDP's; does nothing on CUDA
    *("record_stream", "resize_", "resize_as_", "set_"),
}

# In-place operators that don't read what they write to, in addition to ``out=`` variants.
_OVERWRITING = {
    *("_foreach_copy_", "_foreach_zero_", "fill_", "index_copy_", "index_fill_", "scatter_"),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_"),
    *("uniform_", "zero_"),
}

# Operators that read only the size and type of their first argument.
_FILLING = {
    *("full_like", "ones_like", "zeros_like", "rand_like", "randint_like", "randn_like"),
    *("new_full", "new_ones", "new_zeros"),
}

# Operators whose results are views of their first argument, although their schemas don't say so.
_SILENT_VIEWS = {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}

# Operators that TorchInductor fuses, in addition to those tagged as elementwise or as reductions.
_FUSED = {
    *("_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout", "native_dropout_backward"),
    *("_to_copy", "cat", "copy_", "fill_", "zero_"),
}
_FUSED_TAGS = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}


class OperatorInfo:
    """How to run and record calls to one operator."""

    def __init__(self, func: Operator) -> None:
        schema = func._schema
        self.func = func  # keeps it alive, so that its id isn't reused
        self.schema_name = schema.name
        self.name = schema.name.partition("::")[2]
        self.read_way()

        # For each result: the argument that it aliases (position, name), or None for a new tensor.
        aliases = tuple(_written_argument(schema, result) for result in schema.returns)
        self.aliases = aliases if any(aliases) else None
        # The arguments that the operator writes to.
        self.written_places = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.writes = bool(self.written_places)
        # Single tensors that the operator writes to but doesn't return; it may resize them.
        single = {one.name for one in schema.arguments if isinstance(one.type, torch.TensorType)}
        self.unreturned = (
            [] if self.aliases else [place for place in self.written_places if place[1] in single]
        )
        # Whether the operator may resize the tensors that it writes to.
        writes_out = any(argument.is_out for argument in schema.arguments)
        resizes = self.name in _RESIZING or torch.Tag.inplace_view in func.tags
        self.reshapes = writes_out or resizes
        reduces = any(argument.name == "reduce" for argument in schema.arguments)
        self.overwrites = writes_out or (self.name in _OVERWRITING and not reduces)
        self.fills = self.name in _FILLING
        self.divides_gradients = any(one.name == "grad_scale" for one in schema.arguments)
        self.makes_on_device = any(argument.name == "device" for argument in schema.arguments)
        self.indexes = schema.name in INDEXING
        self.copies = self.name in ("_to_copy", "copy_")  # the only ones that can cross devices

        # How ``compute`` (results.py) runs the operator on values. A kernel that calls other
        # operators may pass them lazily conjugated tensors; other kernels are called directly.
        is_foreach = self.name.startswith("_foreach_")
        self.writes_lists = [p for p, _ in self.written_places if is_foreach]
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.with_generator = _with_generator(func) if self.draws else None
        self.convolves = self.name in ("convolution", "convolution_backward") and not writes_out
        several = torch.Tag.pointwise not in func.tags
        self.unchanged = not (self.draws or self.writes_lists or self.convolves or several)

        # For shapes, a float in a list may determine a size (upsample), except in foreach
        # operators, where it's a factor for one of the tensors.
        self.has_lists_of_factors = is_foreach
        # Whether the host must wait for a value.
        self.waits = (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
        )

        # In a recording
        self.launches_nothing = (
            self.name in _SILENT_VIEWS
            or _gives_views(schema)
            or self.name in _FREE
            or torch.Tag.inplace_view in func.tags
            or schema.name.startswith("prim::")
        )
        self.allocates = self.name in _ALLOCATES
        # Whether torch.compile fuses the operator with its neighbors.
        self.fuses = self.name in _FUSED or not _FUSED_TAGS.isdisjoint(func.tags)

    def read_way(self) -> None:
        """Determine how a call runs: in a handler, in parts, or directly (``run`` in tensor.py)."""
        func, name = self.func, self.func.name()
        self.handler = _handlers.get(name) or _handlers.get(self.schema_name)
        self.shape_handler = _shape_handlers.get(self.schema_name)
        self.records_itself = not _recording_themselves.isdisjoint((name, self.schema_name))
        # Whether a call consists of multiple operators on CUDA (None means never), and what runs
        # them.
        self.decomposes: Condition | None = None
        self.parts: Handler = decompose
        if self.handler is not None:
            return
        if name in _parts:
            self.decomposes, self.parts = _parts[name]
        elif self.schema_name.partition("::")[0] not in TORCHS_OWN:
            self.decomposes = lambda args, kwargs: is_foreign_in_parts(func)
            self.parts = run_foreign
        elif is_composite(func):
            self.decomposes = always
        elif name in OF_SEVERAL:
            self.decomposes, self.parts = always, run_explicit
        elif self.name.startswith("_foreach_"):
            # One kernel if all tensors in the lists are dense and on one device; otherwise one per
            # tensor.
            self.decomposes, self.parts = not_in_one_kernel, one_by_one

    def waits_for(self, args: Args) -> bool:
        """Whether the host must wait for a value in this call.

        With masks, the host must know how many elements they select, unless a single value is
        filled in with a single mask (``canDispatchToMaskedFill``, which also requires the value
        to be on the CPU; on CUDA, a Python number is). Masks reach this point only in calls on
        shapes: for tensors with values, parts.py has already converted them to indices.
        """
        if not self.indexes:
            return self.waits
        indices = [index for index in args[1] if index is not None]
        masked = any(index.dtype in _MASKS for index in indices)
        fills = self.name != "index" and len(indices) == 1 and args[2].numel() == 1
        return masked and not (fills and args[3:4] != (True,))

    def read(self, tensors: Sequence[Any], written: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Return those of a call's tensors whose values it reads."""
        if self.fills:
            return tensors[1:]
        if not self.overwrites:
            return tensors
        found = list(tensors)
        for one in written:  # removed once, since a tensor passed as ``out`` may also be an input
            last = max((at for at, other in enumerate(found) if other is one), default=None)
            if last is not None:
                del found[last]
        return found

    def written(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """Return the tensors that this call modifies in place."""
        found: list[torch.Tensor] = []
        for position, name in self.written_places:
            if name == "grads" and self.divides_gradients and kwargs.get("grad_scale") is None:
                continue  # a fused optimizer changes gradients only to undo a scaler's factor
            value = args[position] if position < len(args) else kwargs.get(name)
            found.extend(tensors_in(value))
        return found


# Keyed by id, because hashing an operator is slow. A record keeps its operator alive, and thus the
# id valid.
KNOWN: dict[int, OperatorInfo] = {}


def info_of(func: Operator) -> OperatorInfo:
    """Return an operator's record, which is created on first use."""
    info = KNOWN.get(id(func))
    if info is None:
        info = KNOWN[id(func)] = OperatorInfo(func)
    return info


def _read_again() -> None:
    for info in KNOWN.values():
        info.read_way()


def _written_argument(schema: Any, result: Any) -> tuple[int, str] | None:
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set == result.alias_info.before_set:
            return position, argument.name
    return None


def _gives_views(schema: torch._C.FunctionSchema) -> bool:
    """Whether a result is a view of an argument."""
    for result in schema.returns:
        info = result.alias_info
        if info is None or info.is_write:
            return False
        for argument in schema.arguments:
            other = argument.alias_info
            if other is None or other.is_write:
                continue
            # For a list of views (split), the schema marks the source with a wildcard.
            if other.before_set & info.before_set or (
                not info.before_set and other.after_set == {"*"}
            ):
                return True
    return False


def _with_generator(func: Operator) -> Operator | None:
    """Return the overload of ``func`` with the same arguments plus a generator, or None."""
    wanted = {argument.name for argument in func._schema.arguments} | {"generator"}
    for overload in (func, *overloads(func._overloadpacket)):
        if {argument.name for argument in overload._schema.arguments} == wanted:
            return overload
    return None
