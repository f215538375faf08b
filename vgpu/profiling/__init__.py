"""Count operators, collectives and bytes sent; ``memory`` and ``peaks`` split memory by cause."""

from vgpu.profiling.counters import (
    MAKE_IT_ON_THE_GPU,
    CollectiveCalls,
    CollectiveCounter,
    CollectiveObserver,
    EagerDispatchMode,
    OperatorLog,
    count_collectives,
    count_collectives_on_gpu,
    own_gpu,
)

__all__ = [
    "MAKE_IT_ON_THE_GPU",
    "CollectiveCalls",
    "CollectiveCounter",
    "CollectiveObserver",
    "EagerDispatchMode",
    "OperatorLog",
    "count_collectives",
    "count_collectives_on_gpu",
    "own_gpu",
]
