"""Operators called, collectives called and bytes sent; memory by cause in ``memory`` and ``peaks``."""

from vgpu.profiling.collective_counters import (
    CollectiveCalls,
    CollectiveCounter,
    ParameterGatherCounter,
    count_collectives,
    count_collectives_on_gpu,
    own_gpu,
)
from vgpu.profiling.operator_log import EagerDispatchMode, OperatorLog

__all__ = [
    "CollectiveCalls",
    "CollectiveCounter",
    "EagerDispatchMode",
    "OperatorLog",
    "ParameterGatherCounter",
    "count_collectives",
    "count_collectives_on_gpu",
    "own_gpu",
]
