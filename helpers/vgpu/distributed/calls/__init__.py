"""One collective: what its arguments say, what they cannot be, and on which GPU a rank takes part."""

from helpers.vgpu.distributed.calls.call import Call, Tensors, plain_name

__all__ = ["Call", "Tensors", "plain_name"]
