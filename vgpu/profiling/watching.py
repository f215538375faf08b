"""What all that watch PyTorch's dispatcher share. Ranks import this file: it imports nothing of ours."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """A dispatch mode that costs no import.

    By default torch guards a mode against being compiled, and imports its whole compiler for that at
    the first call, which takes seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Where plain calls, functional collectives and DTensors end; and what sends nothing there: waits, and
# what makes a result wait when it is used.
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_ASIDE = ("wait", "_wrap", "mesh_get_process_group")

# Operators of torch.ops, by the name that torch.distributed gives to what they do. Those not named
# here are called as their function, but for underscores.
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}


def collective_name(operator: Any) -> str:
    """What torch.distributed calls the collective that an operator carries out; "" if it does none."""
    if operator.namespace not in _NAMESPACES or any(word in str(operator) for word in _ASIDE):
        return ""
    name = operator.overloadpacket.__name__.strip("_")
    return _NAMES.get(name, name)
