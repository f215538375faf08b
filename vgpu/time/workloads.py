"""What one call of an operation computes and moves, regardless of the GPU: FLOPs and bytes.

torch's own ``torch.utils.flop_counter`` counts the FLOPs. Each argument is read once and each
result written once; an argument changed in place is read and written, and one that's overwritten is
only written. Operations on some rows of a table touch only those rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from vgpu.hardware import Product
from vgpu.tensor.operators import Args, Kwargs, Operator, info_of, named_arguments, tensors_in

# What an operation computes with: the float32 units, or tensor cores in a 16-bit or 8-bit format.
# Float32 matmuls and convolutions use tensor cores if torch allows TF32, which may change at any
# time.
FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = "float32", "float16", "bfloat16", "float8"
PRODUCT, CONVOLUTION = "product", "convolution"
TF32 = "tf32"  # always uses TF32, if the GPU has it
_TF32_SWITCH = {PRODUCT: "matmul", CONVOLUTION: "conv"}  # in torch.backends.cuda and .cudnn
_float32_precision = torch._C._get_fp32_precision_getter


class Attention(NamedTuple):
    """The properties of a call to fused attention that determine its speed."""

    head_width: int
    length: int  # the number of keys per sequence
    causal: bool
    backward: bool


class Workload(NamedTuple):
    """What one call of an operation computes and moves, regardless of the GPU."""

    flop: int
    size_bytes: int  # the bytes read and written
    arithmetic: str = FLOAT32
    product: Product | None = None  # the sizes of a matmul
    attention: Attention | None = None  # for fused attention

    @property
    def allows_tf32(self) -> bool:
        """Whether torch's current settings allow TF32 for this operation, on a GPU that has TF32.

        By default, they do for convolutions (``torch.backends.cudnn.allow_tf32``), but not for
        matmuls (``torch.backends.cuda.matmul.allow_tf32``, ``set_float32_matmul_precision``).
        """
        if self.arithmetic == TF32:
            return True
        switch = _TF32_SWITCH.get(self.arithmetic)
        return switch is not None and _float32_precision("cuda", switch) == "tf32"

    def with_current_tf32(self) -> "Workload":
        """Return this workload with torch's current TF32 setting, which may change later."""
        if self.arithmetic not in _TF32_SWITCH:
            return self
        return self._replace(arithmetic=TF32 if self.allows_tf32 else FLOAT32)

    def of_rows(self, parts: int, right_bytes: int) -> "Workload":
        """Return the workload for one of ``parts`` equal parts of a matmul's rows.

        ``right_bytes`` is the size of the right operand, which each part reads.
        """
        size_bytes = (self.size_bytes - right_bytes) // parts + right_bytes
        product = self.product and self.product._replace(
            rows=self.product.rows // parts, written_bytes=self.product.written_bytes // parts
        )
        return Workload(self.flop // parts, size_bytes, self.arithmetic, product)


def work_of(func: Operator, args: Args, kwargs: Kwargs, result: Any) -> Workload:
    """Return the FLOPs and bytes of one finished call; its tensors may be shapes without values."""
    packet = _COUNTED_AS.get(func._schema.name, func._overloadpacket)
    count = flop_registry.get(packet)
    flop = int(count(*args, **kwargs, out_val=result)) if count else 0
    fused = (
        _attention_of(func, args, kwargs) if flop and "_attention" in func._schema.name else None
    )
    if fused is not None and fused.causal:
        flop //= 2  # the masked half is skipped, but the counter counts it
    touched = _touched(func, args, kwargs, result)
    size_bytes = sum(touched_bytes(tensor) for tensor in touched)
    size_bytes -= _untouched_bytes(func, args, kwargs, result, touched)
    if not flop:
        return Workload(flop, size_bytes)
    arithmetic = _arithmetic_of(func, touched)
    return Workload(flop, size_bytes, arithmetic, _product_of(func, flop, result), fused)


def _touched(func: Operator, args: Args, kwargs: Kwargs, result: Any) -> list[torch.Tensor]:
    """Return the tensors that are read or written; those that are both appear twice."""
    info, returns = info_of(func), func._schema.returns
    tensors, written = [*tensors_in((args, tuple(kwargs.values())))], info.written(args, kwargs)
    results = zip(returns, result if len(returns) > 1 else [result], strict=False)
    new = tensors_in([value for one, value in results if one.alias_info is None])
    return [*info.read(tensors, written), *written, *new]


def _untouched_bytes(
    func: Operator, args: Args, kwargs: Kwargs, result: Any, touched: list[torch.Tensor]
) -> int:
    """Return the bytes of ``touched`` that aren't, since the call only touches parts of a table."""
    count_of = _ROWS.get(info_of(func).name)
    if count_of is None:
        return 0
    named = named_arguments(func, args, kwargs)
    table: torch.Tensor = named[func._schema.arguments[0].name]
    count = count_of(table, named, result)
    each_bytes = max(0, touched_bytes(table) - count * table.element_size())
    return each_bytes * sum(one is table for one in touched)


def _chosen(table: torch.Tensor, named: Kwargs, result: Any) -> int:
    """Return how many elements a list of indices chooses; all of them if there's a mask."""
    indices: Sequence[torch.Tensor | None] = named["indices"]
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return table.numel()
    whole = [size for size, index in zip(table.shape, indices, strict=False) if index is None]
    shape: Sequence[int] = torch.broadcast_shapes(*(index.shape for index in given))
    return math.prod([*shape, *whole, *table.shape[len(indices) :]])


def _filled(table: torch.Tensor, named: Kwargs, result: Any) -> int:
    """Return how many elements ``index_fill_`` fills."""
    rows: int = table.shape[named["dim"]] if table.dim() else 1
    return int(named["index"].numel()) * table.numel() // max(rows, 1)


# For operators that read or write only some elements of their first tensor: how many.
_ROWS: dict[str, Callable[[torch.Tensor, Kwargs, Any], int]] = {
    **dict.fromkeys(
        ("embedding", "gather", "index", "index_select", "take", "_unsafe_index"),
        lambda table, named, result: result.numel(),
    ),
    **dict.fromkeys(
        ("index_add_", "index_copy_"), lambda table, named, result: named["source"].numel()
    ),
    **dict.fromkeys(
        ("scatter_", "scatter_add_"), lambda table, named, result: named["index"].numel()
    ),
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _chosen),
    "index_fill_": _filled,
}

# torch's FLOP counter doesn't know these operators.
_COUNTED_AS = {
    "aten::addmm_": torch.ops.aten.addmm,
    "aten::baddbmm_": torch.ops.aten.baddbmm,
    "aten::_scaled_mm_v2": torch.ops.aten.mm,  # called by torch.nn.functional.scaled_mm
}
_PRODUCTS = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    *("aten::_scaled_mm", "aten::_scaled_mm_v2"),
}


def _attention_of(func: Operator, args: Args, kwargs: Kwargs) -> Attention:
    """Return the properties of a fused attention call; keys are (B, heads, S, head width)."""
    named = named_arguments(func, args, kwargs)
    return Attention(
        named["query"].size(-1),
        named["key"].size(-2),
        bool(named.get("is_causal", False)),
        func._schema.name.endswith("_backward"),
    )


def _product_of(func: Operator, flop: int, result: torch.Tensor) -> Product | None:
    """Return the sizes of a matmul."""
    if func._schema.name.removesuffix("_") not in _PRODUCTS:
        return None
    *batch, rows, columns = result.shape
    inner = flop // (2 * result.numel())
    return Product(math.prod(batch), rows, inner, columns, touched_bytes(result))


def _arithmetic_of(func: Operator, touched: list[torch.Tensor]) -> str:
    """Return the arithmetic of an operator that the FLOP counter knows, such as a matmul."""
    types = {tensor.dtype for tensor in touched}
    if types & {torch.float8_e4m3fn, torch.float8_e5m2}:
        return FLOAT8
    if torch.float16 in types:
        return FLOAT16
    if torch.bfloat16 in types:
        return BFLOAT16
    if types != {torch.float32}:
        return FLOAT32
    return CONVOLUTION if "convolution" in func._schema.name else PRODUCT


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes read if the tensor is read once; an expanded dimension counts once."""
    # Querying the virtual tensor would take longer, and might itself be recorded.
    values = getattr(tensor, "_inner", tensor)
    if values.layout is not torch.strided:
        return values._nnz() * values.element_size() if values.layout is torch.sparse_coo else 0
    strides = values.stride()
    if 0 not in strides:
        return values.nbytes
    elements = 1
    for size, stride in zip(values.size(), strides, strict=True):
        if stride or size == 0:
            elements *= size
    return elements * values.element_size()
