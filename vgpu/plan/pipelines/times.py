"""How long a rank's actions take, each beside the collectives that earlier ones have left behind.

The last backward of a chunk reduces its gradients, and what is not reduced when it has computed all
goes on beside the rank's next actions. Their own collectives wait for it, wherever they use the same
links, and computing for those: such an action is played again.
"""

from collections import defaultdict
from collections.abc import Mapping

import vgpu
from vgpu.plan import schedules
from vgpu.plan.schedules import Action
from vgpu.time.simulate import replay_beside
from vgpu.time.timeline import TraceEvent


class Times(schedules.Times):
    """Times of each action, from its timeline. For one play of one schedule."""

    def __init__(
        self, played: Mapping[Action, vgpu.Timeline], devices: int, transfer: float
    ) -> None:
        super().__init__(transfer=transfer)
        self.played = dict(played)
        """What came of each action."""
        self._devices = devices
        self._under_way: dict[int, list[TraceEvent]] = defaultdict(list)
        """By device: collectives that their actions have left behind, in the schedule's time."""

    def end(self, action: Action, chunks: int, start: float) -> float:
        device = action.stage % self._devices
        left = [event for event in self._under_way[device] if event.end_s > start]
        if left:
            others = [_later(event, -start) for event in left]
            self.played[action] = replay_beside(self.played[action], others)
        timeline = self.played[action]
        ready = ready_s(timeline)
        if timeline.makespan_s > ready:
            left += [
                _later(event, start)
                for event in timeline.events
                if event.kind == "collective" and event.end_s > ready
            ]
        self._under_way[device] = left
        return start + ready


def ready_s(timeline: vgpu.Timeline) -> float:
    """When the default stream has computed all; gradients may still be on their way."""
    return max(e.end_s for e in timeline.events if e.kind == "kernel" and e.stream == 0)


def _later(event: TraceEvent, by_s: float) -> TraceEvent:
    return event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s)
