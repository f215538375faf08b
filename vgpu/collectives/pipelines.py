"""``torch.distributed.pipelining`` as a rank of a cluster that does not exist.

Before its first step a schedule lets all stages vote, by an all-reduce of values, whether their
sizes are known (``input_args`` and ``output_args``), and warms up their connections. With torch's
own fake process group it skips both, and says which stage's sizes are missing. Ranks that are
absent have no vote either.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from vgpu import torch_releases
from vgpu.changes import Changes
from vgpu.collectives import groups
from vgpu.collectives.imported import when_imported


def install(changes: Changes) -> None:
    if dist.is_available():
        when_imported("torch.distributed.pipelining.schedules", _without_votes, changes)


def _without_votes(module: ModuleType, changes: Changes) -> None:
    schedule = module._PipelineSchedule
    if torch_releases.votes_in_warm_up(schedule):
        changes.wrap(schedule, "_warmup_p2p", _alone)
    else:
        changes.wrap(schedule, "_initialize_pipeline_distributed_state", _as_a_fake_group)


def _as_a_fake_group(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def initialize(*args: Any, **kwargs: Any) -> None:
        if not groups.ranks_are_absent:
            return plain(*args, **kwargs)
        with mock.patch.object(dist, "get_backend", lambda group=None: "fake"):
            return plain(*args, **kwargs)

    return initialize


def _alone(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def warm_up(*args: Any, **kwargs: Any) -> None:
        return (torch_releases.warm_up_alone if groups.ranks_are_absent else plain)(*args, **kwargs)

    return warm_up
