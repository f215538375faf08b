"""What virtual time must know about an operator, read once from its schema."""

from collections.abc import Iterator
from typing import Any

import torch

from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.same_device import INDEXING

# Operators that launch nothing on a GPU, besides those whose results are views: they hand out or
# release memory, or ask something about a tensor.
_ALLOCATES = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
_FREE = _ALLOCATES | {
    "_assert_tensor_metadata",
    "is_pinned",
    "is_same_size",
    "is_set_to",
    "layout",
    "record_grad_output_stream",  # FSDP's; on CUDA it does nothing
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
}

# Operators whose results view their first argument, though their schema does not say so.
_SILENT_VIEWS = {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}

# What TorchInductor fuses besides what torch tags as elementwise or as a reduction.
_FUSED = {
    *("_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout", "native_dropout_backward"),
    *("_to_copy", "cat", "copy_", "fill_", "zero_"),
}
_FUSED_TAGS = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}

_MASKS = (torch.bool, torch.uint8)


class Traits:
    """How the calls of one operator are seen in a recording."""

    __slots__ = (
        "_written",
        "allocates",
        "copies",
        "free",
        "func",
        "fuses",
        "indexes",
        "name",
        "records_stream",
        "schema_name",
        "view_of",
        "waits",
        "writes",
    )

    def __init__(self, func: Operator) -> None:
        schema = func._schema
        self.func = func  # also keeps its id from another
        self.schema_name = schema.name
        self.name = schema.name.partition("::")[2]
        # Whether it may cross devices.
        self.copies = self.name in ("_to_copy", "copy_")
        # For a result that is a view: the position of the argument that it views.
        self.view_of = 0 if self.name in _SILENT_VIEWS else _viewed(schema)
        self.free = (
            self.view_of is not None
            or self.name in _FREE
            or torch.Tag.inplace_view in func.tags
            or schema.name.startswith("prim::")
        )
        self.allocates = self.name in _ALLOCATES
        # Whether torch.compile fuses it with its neighbours.
        self.fuses = self.name in _FUSED or not _FUSED_TAGS.isdisjoint(func.tags)
        self.records_stream = self.name == "record_stream"
        self.indexes = schema.name in INDEXING
        # Whether the host must know a value before it can go on.
        self.waits = (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
        )
        # The arguments that it writes to.
        self._written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.writes = bool(self._written)

    def waits_for(self, args: Args) -> bool:
        """Whether the host must know a value before this call can go on.

        With masks it must know how many elements they pick, but not to fill in one number
        (``canDispatchToMaskedFill``). Only shapes have masks here: others run in parts
        (dispatch/parts.py).
        """
        if not self.indexes:
            return self.waits
        masked = any(index is not None and index.dtype in _MASKS for index in args[1])
        fills = self.name != "index" and args[2].numel() == 1 and args[3:4] != (True,)
        return masked and not fills

    def written(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """The tensors that this call changes in place."""
        found: list[torch.Tensor] = []
        for position, name in self._written:
            value = args[position] if position < len(args) else kwargs.get(name)
            found.extend(tensors_in(value))
        return found


def _viewed(schema: torch._C.FunctionSchema) -> int | None:
    """The position of the argument that the results view; None if there is none."""
    for result in schema.returns:
        info = result.alias_info
        if info is None or info.is_write:
            return None
        for position, argument in enumerate(schema.arguments):
            other = argument.alias_info
            if other is None or other.is_write:
                continue
            # A list of views (split) is marked by what its source becomes part of.
            if other.before_set & info.before_set or (
                not info.before_set and other.after_set == {"*"}
            ):
                return position
    return None


_traits: dict[int, Traits] = {}  # by id: hashing an operator is slow


def traits_of(func: Operator) -> Traits:
    """The traits of an operator; read at its first call."""
    traits = _traits.get(id(func))
    if traits is None:
        traits = _traits[id(func)] = Traits(func)
    return traits


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
