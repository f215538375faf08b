"""One rank of a pipeline takes a step as shapes, each of its actions recorded for itself.

PyTorch's own FSDP2 and tensor parallelism divide its stages. Between the micro-batches FSDP2 adds up
gradients whole, in float32, and in a stage's last backward it sums them over the ranks. PyTorch's
pipelines do that after the last backward; here it hides behind it as far as it can.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

import vgpu
from vgpu.plan.model import Divided, on_cluster, state_bytes, without_garbage
from vgpu.plan.parallel import Part, Stage, loss_context, parts
from vgpu.plan.pipelines.states import State, states
from vgpu.plan.schedules import FORWARD, Action, Schedule
from vgpu.plan.step import Plan
from vgpu.profiling.peaks import PeakByCause


class Recorded(NamedTuple):
    """A step of one rank: its actions in virtual time, and its bytes."""

    actions: dict[Action, vgpu.Timeline]
    update: vgpu.Timeline
    """The optimizer's step."""
    peak_by_cause: dict[str, int]
    reserved_bytes: int
    state_bytes: dict[str, int]
    in_flight: int
    """Micro-batches that it keeps at the peak, as in ``Step``."""


def recorded(plan: Plan, schedule: Schedule, device: int, **costs: Any) -> Recorded:
    """A step of the slowest rank of the device's stages; costs: as for ``vgpu.record``.

    schedule: the plan's, or with fewer micro-batches.
    """
    with on_cluster(plan, plan.slowest(device).rank) as cluster, vgpu.record_memory() as memory:
        own = _Rank(plan, device, cluster.device)
        with PeakByCause(own.modules, own.optimizer) as peak:
            actions, in_flight = own.step(states(schedule, device), costs)
            with vgpu.record(**costs) as update:
                own.update()
        reserved = memory.reserved(cluster.device, expandable_segments=True)
        return Recorded(
            actions,
            update,
            peak.by_cause,
            reserved.peak_reserved_bytes,
            state_bytes(own.optimizer),
            in_flight,
        )


class _Rank:
    """The stages of one rank, and what it keeps of micro-batches in flight."""

    @without_garbage()
    def __init__(self, plan: Plan, device: int, gpu: torch.device) -> None:
        self._plan, self._device = plan, gpu
        mesh = plan.layout.mesh("vgpu")
        all_parts = parts(plan.sizes.layers, plan.layout.stages * plan.chunks)
        sizes = dataclasses.replace(plan.sizes, sequence=plan.sequence)
        self._parts: dict[int, Part] = {}
        self._stages: dict[int, Divided] = {}
        for stage in range(device, len(all_parts), plan.layout.stages):
            self._parts[stage] = all_parts[stage]
            self._stages[stage] = Divided(Stage(sizes, all_parts[stage]), plan, mesh)
            self._stages[stage].set(plan)
        self.modules = nn.ModuleList(stage.module for stage in self._stages.values())
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), fused=True)
        for parameter in self.modules.parameters():  # a first step makes the optimizer's state
            parameter.grad = torch.zeros_like(parameter)
        self.update()
        self._in_flight: dict[Action, torch.Tensor | GradientEdge] = {}

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(
        self, row: Iterator[tuple[Action, State]], costs: dict[str, Any]
    ) -> tuple[dict[Action, vgpu.Timeline], int]:
        """All micro-batches, forward and backward, in the order of the rank's row.

        Returns also how many are in flight where most is allocated, the one at work included.
        """
        gpu = torch.get_device_module("vgpu")
        actions: dict[Action, vgpu.Timeline] = {}
        peaks: list[tuple[int, int]] = []
        for action, state in row:
            gpu.reset_peak_memory_stats()
            is_forward = action.kind == FORWARD
            with vgpu.record(**costs) as timeline, loss_context(self._plan.layout):
                if is_forward:
                    self._forward(action)
                else:
                    self._backward(action, state.moment.last)
            assert not timeline.races, timeline.races
            actions[action] = timeline
            peaks.append((gpu.max_memory_allocated(), sum(state.in_flight) + is_forward))
        return actions, max(peaks)[1]

    def _forward(self, action: Action) -> None:
        plan, part = self._plan, self._parts[action.stage]
        tokens = torch.randint(
            plan.sizes.vocabulary, (plan.micro_batch, plan.sequence), device=self._device
        )
        given = tokens if part.first else self._hidden().requires_grad_()
        made = self._stages[action.stage].module(given)
        if part.last:
            made = F.cross_entropy(made.flatten(0, 1).float(), tokens.flatten())
        # What was sent is not kept, only the graph behind it. PyTorch's stages do so, too.
        self._in_flight[action] = made if part.last else get_gradient_edge(made)

    def _backward(self, action: Action, last: bool) -> None:
        module = self._stages[action.stage].module
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last)
        module.set_requires_gradient_sync(last)
        made = self._in_flight.pop(action._replace(kind=FORWARD))
        received = None if self._parts[action.stage].last else self._hidden()
        torch.autograd.backward(made, received)

    def _hidden(self) -> torch.Tensor:
        """What a stage receives: a rank's part of each sequence."""
        plan = self._plan
        size = (plan.micro_batch, plan.sequence // plan.layout.tensors, plan.sizes.width)
        return torch.empty(size, device=self._device, dtype=torch.bfloat16)
