"""``F.embedding_bag`` keeps what CUDA's kernel keeps: each index's bag, and places only for maxima.

The CPU's has a way for sums without the bags, and room for places that nobody reads
(ATen/native/EmbeddingBag.cpp; for CUDA's see meta_embedding_bag in torch/_meta_registrations.py).
"""

from typing import Any

import torch

from vgpu.tensor.operations import unwrap, wrap_result
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, named_arguments
from vgpu.tensor.same_device import check_for

_MAXIMA = 2  # of the modes sum, mean and max


def forward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    values, gpu, mixed = unwrap(named.values(), None, False)
    assert gpu is not None, "no virtual tensor among the arguments"
    if mixed:
        check_for(func)(func, args, kwargs)
    named = dict(zip(named, values, strict=True))
    output, bag_of, sizes, places = func(**named)
    indices, offsets = named["indices"], named["offsets"]
    if bag_of.numel() == 0 and indices.numel() > 0:
        ends = torch.searchsorted(offsets, torch.arange(len(indices), device="cpu"), right=True)
        bag_of = (ends - 1).to(indices.dtype)
    if named.get("mode", 0) != _MAXIMA:
        places = indices.new_empty(0)
    return wrap_result((output, bag_of, sizes, places), gpu, "_embedding_bag")


HANDLERS: dict[str, Handler] = dict.fromkeys(
    ("aten::_embedding_bag", "aten::_embedding_bag_forward_only"), forward
)
