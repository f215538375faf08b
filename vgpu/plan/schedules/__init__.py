"""Pipeline schedules as plain data, and what playing them shows."""

from vgpu.plan.schedules.orders import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    all_forward_all_backward,
    from_text,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from vgpu.plan.schedules.simulation import (
    Box,
    DeadlockError,
    Play,
    Times,
    in_flight,
    needs,
    peaks_in_flight,
    play,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT_GRADIENT",
    "KINDS",
    "WEIGHT_GRADIENT",
    "Action",
    "Box",
    "DeadlockError",
    "Play",
    "Schedule",
    "Times",
    "all_forward_all_backward",
    "from_text",
    "in_flight",
    "interleaved",
    "needs",
    "one_forward_one_backward",
    "peaks_in_flight",
    "play",
    "zero_bubble",
]
