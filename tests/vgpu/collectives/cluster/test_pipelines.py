"""PyTorch's own pipelines on ranks of a cluster, recorded one by one and simulated together.

In the toy model, launches take no time, and a GPU reads and writes 1 GB/s and sends 1 GB/s. Each
forward and each backward of a stage is one 2 µs operation per 1 kB micro-batch.
"""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from toy_gpu import KB, toy_gpu

import vgpu
from vgpu.plan.schedules import (
    Times,
    all_forward_all_backward,
    interleaved,
    one_forward_one_backward,
    simulate,
)

US = 1e-6
SLOW = vgpu.Link("1 GB/s", 1e9, 0.0, "made for these tests")
AT_ONCE = vgpu.Link("no time", 1e30, 0.0, "made for these tests")


EXACT = {
    "memory_share": 1.0,
    "link_share": 1.0,
    "python_launch_s": 0.0,
    "engine_launch_s": 0.0,
    "kernel_s": 0.0,
}


class Negative(torch.autograd.Function):
    """Negate in each direction; ``hook`` makes the output require a gradient if ``x`` doesn't."""

    @staticmethod
    def forward(ctx, x, hook):
        return x.neg()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg(), None


class Nothing(torch.autograd.Function):
    """A loss that costs nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.size = x.size()
        return x.new_empty(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_empty(ctx.size)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.hook = nn.Parameter(torch.empty(1))

    def forward(self, x):
        return Negative.apply(x, self.hook)


def recorded(rank, schedule, ranks, micro_batches, link=AT_ONCE, chunks=1, make=Stage):
    """Record one step on one rank, after a step that sets up the pipeline."""
    with vgpu.cluster(1, ranks, gpu=toy_gpu(link), rank=rank) as made, vgpu.shapes_only():
        stages = []
        for index in range(rank, ranks * chunks, ranks):
            module = make().to(made.device)
            x = torch.empty(1, KB, device=made.device, requires_grad=index > 0)
            stages.append(
                PipelineStage(
                    module,
                    index,
                    ranks * chunks,
                    made.device,
                    input_args=(x,),
                    output_args=(module(x),),
                )
            )
        running = schedule(
            stages if chunks > 1 else stages[0],
            micro_batches,
            loss_fn=lambda output, target: Nothing.apply(output),
        )
        whole = torch.empty(micro_batches, KB, device=made.device)

        def step():
            inputs = (whole,) if rank == 0 else ()
            target = {"target": whole} if rank == ranks - 1 else {}
            running.step(*inputs, **target, return_outputs=False)

        step()
        with vgpu.record(**EXACT) as timeline:
            step()
    return timeline


def together(schedule, ranks, micro_batches, **options):
    timelines = [recorded(rank, schedule, ranks, micro_batches, **options) for rank in range(ranks)]
    timeline = vgpu.joined(timelines)
    assert timeline.races == []
    return timeline


def work(timeline, rank):
    """Return (direction, start in µs) for each forward and backward on a rank."""
    return [
        ("B" if event.backward else "F", round(event.start_s / US))
        for event in timeline.of(f"vgpu:{rank}")
        if event.name == "neg"
    ]


# The loss's backward pass begins by creating a one: 8 bytes, 8 ns.
ONES_S = 8e-9


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 8)])
def test_the_bubble_matches_the_formula(schedule, ranks, micro_batches):
    """GPipe and 1F1B steps take (m + p - 1) forwards and backwards (Huang et al., 2019)."""
    timeline = together(schedule, ranks, micro_batches)
    wanted_s = (micro_batches + ranks - 1) * 4 * US
    assert wanted_s <= timeline.makespan_s <= wanted_s + micro_batches * ONES_S + 1e-12
    for device in timeline.devices:
        computing = [event for event in timeline.of(device) if event.name == "neg"]
        assert len(computing) == 2 * micro_batches
        assert sum(event.duration_s for event in computing) == pytest.approx(4 * micro_batches * US)


PLAYED = {
    ScheduleGPipe: all_forward_all_backward(4, 8),
    Schedule1F1B: one_forward_one_backward(4, 8),
    ScheduleInterleaved1F1B: interleaved(4, 8, 2),
}


@pytest.mark.parametrize("schedule", PLAYED)
def test_every_action_starts_when_the_schedule_simulator_predicts(schedule):
    """vgpu.plan.schedules simulates only schedules; here, torch's own code is simulated."""
    chunks = 2 if schedule is ScheduleInterleaved1F1B else 1
    timeline = together(schedule, 4, 8, chunks=chunks)
    times = Times(2 * chunks, chunks, chunks)  # in µs, for all chunks of a device
    for rank, row in enumerate(simulate(PLAYED[schedule], times).boxes):
        assert work(timeline, rank) == [(box.action.kind, round(box.start)) for box in row]


def test_message_times_match_a_hand_calculation():
    """Two stages, two micro-batches, 1 µs per message.

    A message starts when both ends are ready. torch requests the next message once it has enqueued
    the work on the last one: its stream waits for that work, as NCCL's does, so nothing overlaps
    there.
    """
    timeline = together(ScheduleGPipe, 2, 2, link=SLOW)
    assert work(timeline, 0) == [("F", 0), ("F", 2), ("B", 11), ("B", 14)]
    assert work(timeline, 1) == [("F", 3), ("F", 6), ("B", 8), ("B", 10)]
    messages = [
        [round(e.start_s / US) for e in timeline.of(device) if e.kind == "collective"]
        for device in timeline.devices
    ]
    assert messages == [[2, 5, 10, 13]] * 2
    sent = [event for event in timeline.of("vgpu:0") if event.name == "send"]
    assert [round(event.waited_s / US) for event in sent] == [0, 1]
    assert timeline.makespan_s == pytest.approx(16 * US, abs=2 * ONES_S)


def test_the_error_for_missing_sizes_names_the_stage():
    with vgpu.cluster(1, 2, rank=1) as made, vgpu.shapes_only():
        stage = PipelineStage(Stage().to(made.device), 1, 2, made.device)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())
        with pytest.raises(RuntimeError, match="Stage 1 requires dynamic shape inference"):
            schedule.step(target=torch.empty(2, KB, device=made.device))
