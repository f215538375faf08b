"""What does one thing at a time: a GPU's multiprocessors, one direction of a link."""

import bisect
from collections.abc import Sequence


class Resource:
    """Something that does one thing at a time.

    Streams take turns. One whose turn comes late leaves a gap, and work that is launched later but
    can start earlier may fill it.
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

    def free_at(self, ready_s: float) -> float:
        """The first time from ``ready_s`` on that is free."""
        index = bisect.bisect_right(self.ends, ready_s)
        taken = index < len(self.starts) and self.starts[index] <= ready_s
        return self.ends[index] if taken else ready_s

    def worked_until(self, start_s: float, duration_s: float, lost: float = 1.0) -> float:
        """When work of ``duration_s`` ends that begins at ``start_s`` and uses all free time.

        lost: the share of its speed that it loses where the time is not free.
        """
        end_s = start_s + duration_s
        index = bisect.bisect_right(self.ends, start_s)
        while index < len(self.starts) and self.starts[index] < end_s:
            begin_s = max(start_s, self.starts[index])
            taken_s = self.ends[index] - begin_s
            if end_s - begin_s <= taken_s * (1 - lost):  # it ends in there
                return begin_s + (end_s - begin_s) / (1 - lost)
            end_s += taken_s * lost
            index += 1
        return end_s

    def delay(self, start_s: float, end_s: float) -> None:
        """From ``start_s`` on nothing is done until ``end_s``: what was to be done then is late.

        It takes up gaps behind it. What comes after a gap is late where the gap was too short.
        """
        starts, ends = self.starts, self.ends
        index = bisect.bisect_right(ends, start_s)
        if index == len(starts) or starts[index] >= end_s:
            return
        ends[index] += end_s - max(start_s, starts[index])
        while index + 1 < len(starts) and starts[index + 1] <= ends[index]:
            late_s = ends[index] - starts.pop(index + 1)
            ends[index] = ends.pop(index + 1) + late_s

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


class Processors:
    """The multiprocessors of a GPU.

    Kernels take turns, and one on a stream with priority overtakes: it starts when it is ready, and
    whatever is running ends later by the time that it takes. (CUDA lets its blocks go first wherever
    a running one ends, which lasts far less than a kernel; CUDA C++ programming guide, Stream
    priorities.) Priorities among such streams are taken to be equal.

    Beside a collective, kernels without priority lose a share of their speed. One that was placed
    before the collective keeps its times.
    """

    __slots__ = ("_collectives", "_lost", "_others", "_prior")

    def __init__(self, lost: float = 0.0) -> None:
        """lost: the share of the multiprocessors that a collective takes for itself."""
        self._prior = Resource()  # kernels with priority
        self._others = Resource()  # the rest, each with what overtook it
        self._collectives = Resource(), Resource()  # inside the host, and out of it
        self._lost = lost

    @property
    def busy_until_s(self) -> float:
        """When the last kernel without priority ends; 0 if there is none."""
        ends = self._others.ends
        return ends[-1] if ends else 0.0

    def place(self, ready_s: float, duration_s: float) -> tuple[float, float]:
        """A kernel takes the first time that is free from ``ready_s`` on; returns start and end."""
        prior = self._prior
        if not self._lost and (not prior.ends or prior.ends[-1] <= ready_s):
            start_s = self._others.place(ready_s, duration_s)
            return start_s, start_s + duration_s
        start_s = ready_s
        while True:
            start_s = prior.free_at(start_s)
            takes_s = duration_s
            for collectives in self._collectives:
                takes_s = collectives.worked_until(start_s, takes_s, self._lost) - start_s
            takes_s = prior.worked_until(start_s, takes_s) - start_s
            later_s = self._others.free_from(start_s, takes_s)
            if later_s == start_s:
                break
            start_s = later_s
        self._others.place(start_s, takes_s)
        return start_s, start_s + takes_s

    def note_collective(self, start_s: float, end_s: float, between_hosts: bool) -> None:
        """A collective takes multiprocessors; those over the same links take turns."""
        if self._lost:
            self._collectives[between_hosts].place(start_s, end_s - start_s)

    def place_prior(self, ready_s: float, duration_s: float) -> float:
        """A kernel with priority takes its time; returns its start.

        What has been placed and is not over by then ends later.
        """
        start_s = self._prior.place(ready_s, duration_s)
        self._others.delay(start_s, start_s + duration_s)
        return start_s


def place_together(resources: Sequence[Resource], ready_s: float, duration_s: float) -> float:
    """Take the first ``duration_s`` that are free in all ``resources``; returns their start."""
    start_s = ready_s
    while True:
        later_s = max(resource.free_from(start_s, duration_s) for resource in resources)
        if later_s == start_s:
            break
        start_s = later_s
    for resource in resources:
        resource.place(start_s, duration_s)
    return start_s
