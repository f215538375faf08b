"""Kernels that run during collectives: their times, computed by hand.

In the toy model, two ranks send 1 GB/s each, and a GPU with four multiprocessors reads and writes 1
GB/s. Launches and steps take no time.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from toy_gpu import KB, PLAIN, SPEC, times_us, us

import vgpu
from vgpu.time.resources import Processors
from vgpu.time.simulate import replay_beside

GPU = dataclasses.replace(SPEC, multi_processor_count=4)
COSTS = vgpu.CostModel(
    GPU, memory_share=1.0, link_share=1.0, python_launch_s=0.0, engine_launch_s=0.0, kernel_s=0.0
)


@pytest.fixture
def rank():
    """One of two ranks whose tensors are shapes."""
    with vgpu.cluster(hosts=1, gpus_per_host=2, gpu=GPU, link=PLAIN), vgpu.shapes_only():
        yield


def kilobytes(count):
    return torch.empty(count * KB, device="vgpu")


def recorded(**options):
    """Record an all-reduce of 40 µs, and three kernels of 20 µs each, during and after it."""
    sent, read = kilobytes(40), kilobytes(10)
    with vgpu.record(COSTS, **options) as timeline:
        sending = dist.all_reduce(sent, async_op=True)
        for _ in range(3):
            read.neg()
        sending.wait()
    assert times_us(timeline, "collective") == us((0, 40))
    return timeline


def test_kernels_lose_the_multiprocessors_that_a_collective_occupies(rank):
    # They run at three quarters of their speed until 40 µs. By then, the second one has done 10 of
    # its 20 µs.
    timeline = recorded(collective_processors=1)
    assert times_us(timeline, "kernel") == us((0, 80 / 3), (80 / 3, 50), (50, 70))
    assert vgpu.replay(timeline).events == timeline.events


def test_collectives_take_no_multiprocessors_unless_a_replay_says_so(rank):
    plain = recorded()
    assert times_us(plain, "kernel") == us((0, 20), (20, 40), (40, 60))
    # At half its speed, the first kernel alone lasts until 40 µs.
    again = vgpu.replay(plain, collective_processors=2)
    assert times_us(again, "kernel") == us((0, 40), (40, 60), (60, 80))


def test_an_earlier_collective_occupies_links_and_multiprocessors(rank):
    timeline = recorded(collective_processors=1)
    (sending,) = (event for event in timeline.events if event.kind == "collective")
    # The other collective lasts until 10 µs, and counts even though it's from an
    # equivalent rank on another GPU.
    before = sending._replace(start_s=-30e-6, end_s=10e-6, device=torch.device("vgpu:1"))
    again = replay_beside(timeline, [before])
    assert times_us(again, "collective") == us((10, 50))
    # By then, the second has done 17.5 of its 20 µs.
    assert times_us(again, "kernel") == us((0, 80 / 3), (80 / 3, 52.5), (52.5, 72.5))
    assert replay_beside(timeline, []).events == timeline.events


def test_a_kernel_from_before_the_collective_keeps_its_times(rank):
    side = torch.vgpu.Stream("vgpu:0")
    sent, read = kilobytes(40), kilobytes(10)
    with vgpu.record(COSTS, collective_processors=1) as timeline:
        with torch.vgpu.stream(side):
            read.neg()
        dist.all_reduce(sent)
    assert times_us(timeline, "collective") == us((0, 40))
    assert times_us(timeline, "kernel") == us((0, 20))


def test_a_kernel_with_priority_and_a_collective_both_delay_a_kernel():
    processors = Processors(lost=0.25)
    processors.note_collective(0.0, 40.0, between_hosts=False)
    assert processors.place_prior(10.0, 6.0) == 10.0
    # 20 µs at three quarters of the speed take 26 2/3 µs, plus 6 µs for the kernel that overtakes.
    assert processors.place(0.0, 20.0) == (0.0, pytest.approx(80 / 3 + 6))


@pytest.mark.parametrize(
    ("count", "words"),
    [(-1, "of at least 0, got -1"), (4, "less than the number of multiprocessors")],
)
def test_collectives_must_leave_some_multiprocessors(count, words):
    with pytest.raises(ValueError, match=f"collective_processors must be .*{words}"):
        vgpu.CostModel(GPU, collective_processors=count)


def test_a_compiled_program_ends_before_a_wait_for_a_collective(rank):
    sent, read = kilobytes(40), kilobytes(10)
    with vgpu.record(dataclasses.replace(COSTS, fuses=True)) as timeline:
        sending = dist.all_reduce(sent, async_op=True)
        before = read.neg()
        sending.wait()
        after = before + sent[: read.numel()]
    # If both were deferred until after the wait, they would be one kernel.
    assert times_us(timeline, "kernel") == us((0, 20), (40, 70))
    assert after.device == read.device


def test_a_deferred_write_is_launched_before_a_collective_overwrites_part_of_it(rank):
    part, read = kilobytes(5), kilobytes(20)
    with vgpu.record(dataclasses.replace(COSTS, fuses=True)) as timeline:
        whole = read.neg()
        dist.all_gather_single(whole[: 2 * part.numel()], part)
    assert times_us(timeline, "kernel") == us((0, 40))
    ((begin, _),) = times_us(timeline, "collective")
    assert begin == pytest.approx(40) and timeline.races == []


def test_a_compiled_program_continues_across_wait_tensor(rank):
    sent, read = kilobytes(40), kilobytes(10)
    with vgpu.record(dataclasses.replace(COSTS, fuses=True)) as timeline:
        summed = functional.all_reduce(sent, "sum", dist.group.WORLD)
        before = read.neg()
        after = functional.wait_tensor(summed)[: read.numel()] + before
        del before  # so it is never written
    assert times_us(timeline, "kernel") == us((40, 70))
    assert after.device == read.device
