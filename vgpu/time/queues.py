"""Threads, streams, and the moments that have not come yet, for which work stands in line."""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from vgpu.time.resources import Processors


class ThreadTime:
    """One thread of the host: its time, and how long it takes to hand an operation over."""

    __slots__ = ("launch_s", "now_s", "number")

    def __init__(self, number: int, now_s: float, launch_s: float) -> None:
        self.number = number
        self.now_s = now_s
        self.launch_s = launch_s


class Lane:
    """One stream: when it is free, and what stands in line for it."""

    __slots__ = ("compute", "device", "first", "free_s", "kernel", "line", "number")

    def __init__(
        self, device: torch.device, number: int, compute: Processors, first: bool = False
    ) -> None:
        self.device = device
        self.number = number
        self.compute = compute  # shared by all streams of the device
        self.first = first  # whether its kernels pass those of others
        self.free_s = 0.0
        self.kernel: int | None = None  # the number of its last one among the player's events
        self.line: deque[Turn] = deque()  # the first one waits for something


class Turn:
    """Something that stands in line on each of some streams, and runs when it is first on all."""

    __slots__ = ("lanes", "run")

    def __init__(self, lanes: Sequence[Lane], run: Callable[[], bool]) -> None:
        self.lanes = lanes
        self.run = run  # False as long as it has to wait


class Lines:
    """The moments of one program, and what goes on when one comes."""

    def __init__(self) -> None:
        self.moments: list[float | None] = []  # None until it has come
        self._in_line: dict[int, list[Lane]] = {}  # streams that wait for a moment
        self._woken: deque[Lane] = deque()

    def come(self, moment: int) -> float:
        """The time of a moment that has come."""
        time_s = self.moments[moment]
        assert time_s is not None, f"moment {moment} has not come"
        return time_s

    def begin_moment(self) -> int:
        self.moments.append(None)
        return len(self.moments) - 1

    def end_moment(self, moment: int, time_s: float) -> None:
        self.moments[moment] = time_s
        if self._in_line:
            self._woken.extend(self._in_line.pop(moment, ()))

    def wake_at(self, moment: int, lane: Lane) -> None:
        """What stands first in line for a stream waits for a moment."""
        self._in_line.setdefault(moment, []).append(lane)

    def wake_later(self, lane: Lane) -> None:
        """What stands first in line for a stream need not wait any longer."""
        self._woken.append(lane)

    def give(self, lanes: Sequence[Lane], run: Callable[[], bool]) -> None:
        """Run something now, or when all that stands before it on these streams has run."""
        turn = Turn(lanes, run)
        for lane in lanes:
            lane.line.append(turn)
        if all(lane.line[0] is turn for lane in lanes):
            self._go_on(lanes[0])

    def wake(self) -> bool:
        """Go on with the streams whose moments have come; returns whether there were any."""
        some = bool(self._woken)
        while self._woken:
            self._go_on(self._woken.popleft())
        return some

    def _go_on(self, lane: Lane) -> None:
        while lane.line:
            turn = lane.line[0]
            if any(other.line[0] is not turn for other in turn.lanes) or not turn.run():
                return
            for other in turn.lanes:
                other.line.popleft()
                if other is not lane and other.line:
                    self._woken.append(other)
