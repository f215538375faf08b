"""Device meshes of a cluster that is left: DTensor must not find them again."""

import functools
import gc
import sys

import torch

_DTENSOR = "torch.distributed.tensor"


def forget() -> None:
    """Empty the caches of DTensor's planning.

    They hold meshes, and two meshes count as equal there although this process has other ranks, and
    so other groups, in each.
    """
    if _DTENSOR not in sys.modules:
        return
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith(_DTENSOR):
            found.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:  # C++ has a cache of its own since torch 2.10
        clear()
