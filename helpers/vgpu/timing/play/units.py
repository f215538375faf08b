"""What does one thing at a time: a GPU's multiprocessors, one direction of a link."""

import bisect
from collections.abc import Sequence


class Unit:
    """Something that does one thing at a time.

    Streams take turns. One whose turn comes late leaves a gap, and work that is handed over later
    but can start earlier may fill it.
    """

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def free_from(self, ready_s: float, duration_s: float) -> float:
        """When the first ``duration_s`` begin that are free from ``ready_s`` on."""
        starts, ends = self.starts, self.ends
        index = bisect.bisect_right(ends, ready_s)
        start_s = ready_s
        while index < len(starts) and start_s + duration_s > starts[index]:
            start_s = max(start_s, ends[index])
            index += 1
        return start_s

    def place(self, ready_s: float, duration_s: float) -> float:
        """Take the first ``duration_s`` that are free from ``ready_s`` on; returns their start."""
        starts, ends = self.starts, self.ends
        if not ends or ready_s >= ends[-1]:
            if ends and ready_s == ends[-1]:
                ends[-1] = ready_s + duration_s
            else:
                starts.append(ready_s)
                ends.append(ready_s + duration_s)
            return ready_s
        start_s = self.free_from(ready_s, duration_s)
        index = bisect.bisect_right(ends, start_s)
        end_s = start_s + duration_s
        if index and ends[index - 1] == start_s:
            index -= 1
            ends[index] = end_s
        else:
            starts.insert(index, start_s)
            ends.insert(index, end_s)
        if index + 1 < len(starts) and starts[index + 1] == ends[index]:
            ends[index] = ends.pop(index + 1)
            starts.pop(index + 1)
        return start_s


def place_together(units: Sequence[Unit], ready_s: float, duration_s: float) -> float:
    """Take the first ``duration_s`` that are free in all ``units``; returns their start."""
    start_s = ready_s
    while True:
        later_s = max(unit.free_from(start_s, duration_s) for unit in units)
        if later_s == start_s:
            break
        start_s = later_s
    for unit in units:
        unit.place(start_s, duration_s)
    return start_s
