"""Device meshes of a cluster that is left: DTensor must not find them again."""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

_DTENSOR = "torch.distributed.tensor"


def forget() -> None:
    """Empty the caches of DTensor's planning.

    They hold meshes, and two meshes count as equal there although this process has other ranks, and
    so other groups, in each.
    """
    if _DTENSOR not in sys.modules:
        return
    for cache in _caches():
        cache.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # C++ has one of its own


def _caches() -> Iterator[Any]:
    """Those of functions, of methods, and of the dispatcher that all DTensors share.

    Not by a look through the garbage collector's objects: what a rank's process has imported
    before it was forked is frozen, and missing there.
    """
    dispatcher: Any = sys.modules[_DTENSOR].DTensor._op_dispatcher
    yield dispatcher.sharding_propagator.propagate_op_sharding.cache
    for name, module in list(sys.modules.items()):
        if not name.startswith(_DTENSOR):
            continue
        for value in list(vars(module).values()):
            members = vars(value).values() if isinstance(value, type) else (value,)
            for member in members:
                found = getattr(member, "__func__", member)  # of a static method
                if isinstance(found, functools._lru_cache_wrapper):
                    yield found
