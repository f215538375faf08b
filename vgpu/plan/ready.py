"""A process beside this one that has answers ready: the last plan's neighbours, before anybody asks.

Most of what an answer costs is to divide a model and take its first step. The process does that once
for each layout; its ranks then take a step with any batch and checkpoints.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from vgpu.launch.forkserver import context, main_module_hidden
from vgpu.plan.few_layers import FewLayers, check, ranks_of, recorded
from vgpu.plan.model import on_cluster
from vgpu.plan.parallel import Layout
from vgpu.plan.rank import Rank
from vgpu.plan.step import Plan
from vgpu.plan.workers import begin

_FREE = ("layout", "batch", "checkpoint", "reshard_after_forward")
"""What may differ from plan to plan."""


class Ready:
    """Plans of one cluster and model, each answered as ``in_few_layers`` does.

    The process starts with ``begin``, or when it is first asked. It ends with ``end``, and with this
    process, whatever ends that.
    """

    def __init__(self, plan: Plan, others: Sequence[Plan] = ()) -> None:
        """plan: names the cluster and the model; the first to have neighbours among ``others``."""
        self._cluster = plan
        self._others = list(others)
        self._process: Any = None

    def begin(self) -> None:
        """Start the process if there is none."""
        if self._process is not None:
            return
        starts = context()
        self._asking, theirs = starts.Pipe()
        # Nobody writes into it: that its only writer is gone is the message.
        reader, self._alive = starts.Pipe(duplex=False)
        self._process = starts.Process(
            target=_serve, args=(theirs, reader, self._cluster, self._others), daemon=True
        )
        with theirs, reader, main_module_hidden():
            self._process.start()

    def takes(self, plan: Plan) -> bool:
        """Whether a plan is for the same cluster and model, and no pipeline.

        And whether the same rank shows its step: the process is one rank of the cluster.
        """
        free = {name: getattr(plan, name) for name in _FREE}
        if plan.layout.stages > 1 or plan.layout.ranks != self._cluster.layout.ranks:
            return False
        if plan.slowest().rank != self._cluster.slowest().rank:
            return False
        return dataclasses.replace(self._cluster, **free) == plan

    def answer(self, plan: Plan) -> FewLayers:
        """What ``in_few_layers`` says of a plan for the same cluster and model.

        Raises what that raises, ValueError for another cluster or model, and RuntimeError where the
        process has died.
        """
        check(plan)
        if not self.takes(plan):
            raise ValueError(
                f"{plan} is not for the cluster and the model whose ranks are ready: only "
                f"{', '.join(_FREE)} may differ from {self._cluster}, and the rank whose groups "
                f"are the slowest must be {self._cluster.slowest().rank}"
            )
        self.begin()
        try:
            self._asking.send(plan)
            # An answer that Ctrl+C kept from being taken is still in the pipe.
            while (said := self._asking.recv())[0] != plan:
                pass
        except (EOFError, OSError) as error:
            self.end()
            raise RuntimeError(
                "the process that was to predict plans has died, perhaps for lack of memory; "
                "the next question starts another one"
            ) from error
        if isinstance(said[1], Exception):
            raise said[1]
        found: FewLayers = said[1]
        return found

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._asking.close()
            self._alive.close()
            self._process = None


def _serve(asking: Connection, reader: Connection, cluster: Plan, others: list[Plan]) -> None:
    begin(reader)
    with suppress(AttributeError, PermissionError):  # Windows has no such thing
        os.nice(5)  # the notebook goes first
    with suppress(EOFError, OSError), on_cluster(cluster):
        answers = _Answers()
        near = cluster
        while True:
            left = [plan for plan in others if plan not in answers and are_neighbours(plan, near)]
            if left and not asking.poll():
                answers.of(left[0])
            else:
                near = asking.recv()
                asking.send((near, answers.of(near)))


def are_neighbours(plan: Plan, other: Plan) -> bool:
    """Whether one thing differs: checkpoints, or twice as many of something, tensors or replicas."""
    parts = (
        (plan.batch, other.batch),
        (plan.layout.tensors, other.layout.tensors),
        (plan.layout.replicas, other.layout.replicas),
    )
    doublings = sum(abs(math.log2(one / another)) for one, another in parts)
    return doublings + (plan.checkpoint != other.checkpoint) <= 1


class _Answers:
    """Ranks and answers so far."""

    def __init__(self) -> None:
        self._ranks: dict[Layout, list[Rank]] = {}
        self._found: dict[Plan, FewLayers | Exception] = {}

    def __contains__(self, plan: Plan) -> bool:
        return plan in self._found

    def of(self, plan: Plan) -> FewLayers | Exception:
        if plan not in self._found:
            try:
                self._found[plan] = self._recorded(plan)
            except Exception as error:
                self._found[plan] = error
        return self._found[plan]

    def _recorded(self, plan: Plan) -> FewLayers:
        if plan.layout not in self._ranks:
            self._ranks[plan.layout] = ranks_of(plan)
        return recorded(plan, self._ranks[plan.layout])
