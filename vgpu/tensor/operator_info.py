"""All that must be known about an operator, read once: from its schema, and from the handlers here.

``info_of(func)`` is the one place where the record of an operator is looked up.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from vgpu.tensor import operators
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, overloads, tensors_in

# Whether a call with these arguments is several operators on CUDA.
Condition = Callable[[Args, Kwargs], bool]
# The mode of the shapes_only() block that a call came through; C++ switches it off meanwhile.
ShapesMode = AbstractContextManager[object]
ShapeHandler = Callable[[Operator, Args, Kwargs, ShapesMode], Any]

# By "name", for all overloads of an operator, or "name.overload" for one.
_handlers: dict[str, Handler] = {}
_shape_handlers: dict[str, ShapeHandler] = {}
_parts: dict[str, tuple[Condition, Handler]] = {}
_recording_themselves: set[str] = set()


def handler(*names: str, records_itself: bool = False) -> Callable[[Handler], Any]:
    """Decorator: the function runs the operators ``names`` on tensors with values.

    records_itself: it tells the recording that is on what happened; otherwise ``run`` records one
    kernel for the call.
    """

    def register(function: Handler) -> Any:
        _handlers.update(dict.fromkeys(names, function))
        _recording_themselves.update(names if records_itself else ())
        _read_again()
        return function

    return register


def shape_handler(*names: str) -> Callable[[ShapeHandler], ShapeHandler]:
    """Decorator: the function runs and records the operators ``names`` on shapes.

    Other operators are looked up by their signature, also those with a handler for values.
    """

    def register(function: ShapeHandler) -> ShapeHandler:
        _shape_handlers.update(dict.fromkeys(names, function))
        _read_again()
        return function

    return register


def always(args: Args, kwargs: Kwargs) -> bool:
    return True


def in_parts(*names: str, when: Condition = always) -> Callable[[Handler], Handler]:
    """Decorator: where ``when`` says so, the function runs the operators ``names``, in parts.

    It calls the operators that the call is on CUDA, and they arrive at ``run`` one by one. A name of
    aten's without an overload is for the overload "default" alone.
    """

    def register(function: Handler) -> Handler:
        _parts.update(dict.fromkeys(names, (when, function)))
        _read_again()
        return function

    return register


# Operators whose second argument is a list of indices, integers or masks.
INDEXING = {
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
}
_MASKS = (torch.bool, torch.uint8)

# In-place operators that may change the size, the strides or the storage of their argument, besides
# those that carry torch's own tag for it and those that write to ``out=``.
_RESIZING = {"resize_", "resize_as_", "set_", "resize", "swap_tensors", "addbmm_"}

# Operators that launch nothing on a GPU, besides those whose results are views: they hand out or
# release memory, or ask something about a tensor.
_ALLOCATES = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
}
_FREE = _ALLOCATES | {
    *("_assert_tensor_metadata", "is_pinned", "is_same_size", "is_set_to", "layout"),
    "record_grad_output_stream",  # FSDP's; on CUDA it does nothing
    *("record_stream", "resize_", "resize_as_", "set_"),
}

# Operators whose results view their first argument, though their schema does not say so.
_SILENT_VIEWS = {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}

# What TorchInductor fuses besides what torch tags as elementwise or as a reduction.
_FUSED = {
    *("_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout", "native_dropout_backward"),
    *("_to_copy", "cat", "copy_", "fill_", "zero_"),
}
_FUSED_TAGS = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}


class OperatorInfo:
    """How to run and record the calls of one operator."""

    __slots__ = (
        "aliases",
        "allocates",
        "convolves",
        "copies",
        "decomposes",
        "draws",
        "func",
        "fuses",
        "handler",
        "has_lists_of_factors",
        "indexes",
        "launches_nothing",
        "makes_on_device",
        "name",
        "parts",
        "records_itself",
        "reshapes",
        "schema_name",
        "shape_handler",
        "unchanged",
        "unreturned",
        "waits",
        "with_generator",
        "writes",
        "writes_lists",
        "written_places",
    )

    def __init__(self, func: Operator) -> None:
        schema = func._schema
        self.func = func  # also keeps its id from another
        self.schema_name = schema.name
        self.name = schema.name.partition("::")[2]
        self.read_way()

        # For each result, the argument that it is (position, name), or None for a new tensor.
        aliases = tuple(_written_argument(schema, result) for result in schema.returns)
        self.aliases = aliases if any(aliases) else None
        # The arguments that it writes to.
        self.written_places = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.writes = bool(self.written_places)
        # Single tensors that it writes to and does not return: it may give them another size.
        single = {one.name for one in schema.arguments if isinstance(one.type, torch.TensorType)}
        self.unreturned = (
            [] if self.aliases else [place for place in self.written_places if place[1] in single]
        )
        # Whether the size of what it writes to may have changed afterwards.
        writes_out = any(argument.is_out for argument in schema.arguments)
        resizes = self.name in _RESIZING or torch.Tag.inplace_view in func.tags
        self.reshapes = writes_out or resizes
        self.makes_on_device = any(argument.name == "device" for argument in schema.arguments)
        self.indexes = schema.name in INDEXING
        self.copies = self.name in ("_to_copy", "copy_")  # the only ones that may cross devices

        # With values: which of the ways of compute.py. A kernel that consists of several operators
        # may conjugate lazily between them; others are called on the values unchanged.
        is_foreach = self.name.startswith("_foreach_")
        self.writes_lists = [p for p, _ in self.written_places if is_foreach]
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.with_generator = _with_generator(func) if self.draws else None
        self.convolves = self.name in ("convolution", "convolution_backward") and not writes_out
        several = torch.Tag.pointwise not in func.tags
        self.unchanged = not (self.draws or self.writes_lists or self.convolves or several)

        # As shapes: a fraction in a list may decide a size (upsample), but foreach operators have a
        # factor for each tensor there.
        self.has_lists_of_factors = is_foreach
        # Whether the host must know a value before it can go on.
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
        # Whether torch.compile fuses it with its neighbours.
        self.fuses = self.name in _FUSED or not _FUSED_TAGS.isdisjoint(func.tags)

    def read_way(self) -> None:
        """Which way a call goes: through a handler, in parts, or neither (``run`` in tensor.py)."""
        func, name = self.func, self.func.name()
        self.handler = _handlers.get(name) or _handlers.get(self.schema_name)
        self.shape_handler = _shape_handlers.get(self.schema_name)
        self.records_itself = not _recording_themselves.isdisjoint((name, self.schema_name))
        # Whether a call is several operators on CUDA, and what runs them; None: it never is.
        self.decomposes: Condition | None = None
        self.parts: Handler = operators.decompose
        if self.handler is not None:
            return
        if name in _parts:
            self.decomposes, self.parts = _parts[name]
        elif self.schema_name.partition("::")[0] not in operators.TORCHS_OWN:
            self.decomposes = lambda args, kwargs: operators.is_foreign_in_parts(func)
            self.parts = operators.run_foreign
        elif operators.is_composite(func):
            self.decomposes = always
        elif name in operators.OF_SEVERAL:
            self.decomposes, self.parts = always, operators.run_explicit
        elif self.name.startswith("_foreach_"):
            # One kernel for lists of dense tensors on one device; no other lists are fit for it.
            self.decomposes, self.parts = operators.not_in_one_kernel, operators.one_by_one

    def waits_for(self, args: Args) -> bool:
        """Whether the host must know a value before this call can go on.

        With masks it must know how many elements they pick, but not to fill in one number
        (``canDispatchToMaskedFill``). Only shapes have masks here: with values the mask becomes
        indices first (parts.py).
        """
        if not self.indexes:
            return self.waits
        masked = any(index is not None and index.dtype in _MASKS for index in args[1])
        fills = self.name != "index" and args[2].numel() == 1 and args[3:4] != (True,)
        return masked and not fills

    def written(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """The tensors that this call changes in place."""
        found: list[torch.Tensor] = []
        for position, name in self.written_places:
            value = args[position] if position < len(args) else kwargs.get(name)
            found.extend(tensors_in(value))
        return found


# By id: hashing an operator is slow. A record keeps its operator, and so the id, alive.
KNOWN: dict[int, OperatorInfo] = {}


def info_of(func: Operator) -> OperatorInfo:
    """The record of an operator; made at its first call."""
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
    """Whether a result views an argument."""
    for result in schema.returns:
        info = result.alias_info
        if info is None or info.is_write:
            return False
        for argument in schema.arguments:
            other = argument.alias_info
            if other is None or other.is_write:
                continue
            # A list of views (split) is marked by what its source becomes part of.
            if other.before_set & info.before_set or (
                not info.before_set and other.after_set == {"*"}
            ):
                return True
    return False


def _with_generator(func: Operator) -> Operator | None:
    """The overload of ``func`` that takes a generator beside the same arguments, or None."""
    wanted = {argument.name for argument in func._schema.arguments} | {"generator"}
    for overload in (func, *overloads(func._overloadpacket)):
        if {argument.name for argument in overload._schema.arguments} == wanted:
            return overload
    return None
