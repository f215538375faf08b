"""What PyTorch is asked for: operations, and on a rank collectives (``sent.py`` has their bytes)."""

from vgpu.profiling.operator_log import (
    Calls,
    Collectives,
    answer_counted,
    counted,
    counted_on_gpu,
    own_gpu,
)

__all__ = ["Calls", "Collectives", "answer_counted", "counted", "counted_on_gpu", "own_gpu"]
