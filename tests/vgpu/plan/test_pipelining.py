"""torch.distributed.pipelining: its orders are ours, and its gradients those of one process."""

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from vgpu import launch
from vgpu.plan import schedules

RANKS, MICRO_BATCHES, WIDTH = 2, 4, 8


def make_stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def loss(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum")


def batch():
    torch.manual_seed(1)
    return torch.randn(2, 3 * MICRO_BATCHES, WIDTH)


def note_actions(stage, index, seen):
    """Let a stage write each forward and backward into ``seen``, when it really happens."""

    def forward(module, inputs, output):
        micro_batch = sum(text.startswith(f"{index}F") for text in seen)
        seen.append(f"{index}F{micro_batch}")
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(f"{index}B{micro_batch}"))

    stage.register_forward_hook(forward)


def on_a_rank(rank, world_size, name, chunks):
    """The gradients of each of the rank's stages, and what they did, in order."""
    # What is random on a rank must not matter: weights and data have seeds of their own.
    torch.manual_seed(100 + rank)
    own = dict(list(enumerate(make_stages(chunks * world_size)))[rank::world_size])
    seen = []
    for index, stage in own.items():
        note_actions(stage, index, seen)
    stages = [
        pipelining.PipelineStage(stage, index, chunks * world_size, torch.device("cpu"))
        for index, stage in own.items()
    ]
    schedule = getattr(pipelining, name)(
        stages if chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=loss, scale_grads=False
    )
    x, y = batch()
    arguments = (x,) if rank == 0 else ()
    targets = {"target": y} if rank == world_size - 1 else {}
    for _ in range(2):  # the first step also learns shapes
        seen.clear()
        for stage in own.values():
            stage.zero_grad()
        schedule.step(*arguments, **targets)
    return {index: [p.grad for p in stage.parameters()] for index, stage in own.items()}, seen


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ScheduleGPipe", schedules.all_forward_all_backward(RANKS, MICRO_BATCHES)),
        ("Schedule1F1B", schedules.one_forward_one_backward(RANKS, MICRO_BATCHES)),
        ("ScheduleInterleaved1F1B", schedules.interleaved(RANKS, MICRO_BATCHES, 2)),
    ],
    ids=["GPipe", "1F1B", "interleaved"],
)
def test_gradients_are_those_of_one_process_and_the_order_is_ours(name, ours):
    results = launch.run(on_a_rank, RANKS, name, ours.chunks)
    single = make_stages(ours.stages)
    x, y = batch()
    loss(nn.Sequential(*single)(x), y).backward()
    found = results[0][0] | results[1][0]
    for index, stage in enumerate(single):
        torch.testing.assert_close(found[index], [p.grad for p in stage.parameters()])
    assert [seen for _, seen in results] == [list(map(str, row)) for row in ours.rows]
