"""Streams with priority: their kernels overtake those of other streams, at times computed by hand.

In the toy model, a launch takes 1 µs, a GPU reads and writes 1 GB/s, and everything else is free.
"""

import pytest
import torch
from toy_gpu import COSTS, KB, SPEC, times_us, us

import vgpu

pytestmark = pytest.mark.virtual_gpus(2, gpu=SPEC)


def neg(kilobytes):
    """Return a function that launches a kernel of 2 µs per kB: half to read, half to write."""
    return torch.ones(kilobytes * KB, device="vgpu:0").neg


def replayed(timeline):
    """Return the timeline after checking that its replay is identical, bit for bit."""
    assert vgpu.replay(timeline).events == timeline.events
    return times_us(timeline)


def test_a_stream_has_the_priority_that_it_was_created_with():
    made = [torch.vgpu.Stream("vgpu:0", priority=p) for p in (2, 0, -1, -3, -9)]
    assert [stream.priority for stream in made] == [0, 0, -1, -3, -3]
    assert torch.Stream("vgpu:1", priority=-1).priority == -1
    with torch.vgpu.stream(made[2]):
        assert torch.vgpu.current_stream().priority == -1
    assert torch.vgpu.default_stream().priority == torch.vgpu.current_stream().priority == 0


@pytest.mark.parametrize("priority", [0, -1])
def test_a_kernel_with_priority_overtakes_those_before_it(priority):
    side = torch.vgpu.Stream("vgpu:0", priority=priority)
    long, short, after = neg(10), neg(5), neg(10)
    with vgpu.record(COSTS) as timeline:
        long()
        with torch.vgpu.stream(side):
            short()
        after()
    overtaken = us((1, 31), (2, 12), (31, 51))
    assert replayed(timeline) == (overtaken if priority else us((1, 21), (21, 31), (31, 51)))


def test_a_kernel_is_delayed_by_one_with_priority_that_starts_later():
    side, copies = torch.vgpu.Stream("vgpu:0", priority=-1), torch.vgpu.Stream("vgpu:0")
    sent, short, long, after = torch.ones(5 * KB, device="vgpu:0"), neg(2), neg(10), neg(1)
    with vgpu.record(COSTS) as timeline:
        with torch.vgpu.stream(copies):
            sent.to("vgpu:1")  # from 1 to 6
        side.wait_stream(copies)
        with torch.vgpu.stream(side):
            short()
        long()  # 3 µs before it's overtaken, 17 µs after
        after()
    assert replayed(timeline) == us((6, 10), (3, 27), (27, 29))


def test_a_kernel_that_gets_ready_while_one_with_priority_runs_is_delayed_only_by_the_rest():
    side, copies = torch.vgpu.Stream("vgpu:0", priority=-1), torch.vgpu.Stream("vgpu:0")
    sent, short, long, after = torch.ones(5 * KB, device="vgpu:0"), neg(3), neg(10), neg(1)
    with vgpu.record(COSTS) as timeline:
        with torch.vgpu.stream(copies):
            sent.to("vgpu:1")  # from 1 to 6
        torch.vgpu.default_stream("vgpu:0").wait_stream(copies)
        long()  # ready at 6
        with torch.vgpu.stream(side):
            short()  # from 3 to 9
        after()  # 20 µs later
    last = timeline.of("vgpu:0")[-1]
    assert (last.start_s * 1e6, last.end_s * 1e6) == pytest.approx((29, 31))
    assert vgpu.replay(timeline).events == timeline.events


def test_a_kernel_launched_while_one_with_priority_runs_waits():
    side = torch.vgpu.Stream("vgpu:0", priority=-1)
    short, long = neg(5), neg(10)
    with vgpu.record(COSTS) as timeline:
        with torch.vgpu.stream(side):
            short()
        long()
    assert replayed(timeline) == us((1, 11), (11, 31))


def test_two_streams_with_priority_take_turns():
    first, second = (torch.vgpu.Stream("vgpu:0", priority=p) for p in (-1, -2))
    long, one, other, after = neg(10), neg(2), neg(3), neg(1)
    with vgpu.record(COSTS) as timeline:
        long()
        for stream, kernel in ((first, one), (second, other)):
            with torch.vgpu.stream(stream):
                kernel()
        after()
    assert replayed(timeline) == us((1, 31), (2, 6), (6, 12), (31, 33))


def test_a_stream_that_waits_for_a_delayed_kernel_waits_longer():
    side, third = torch.vgpu.Stream("vgpu:0", priority=-1), torch.vgpu.Stream("vgpu:0")
    sent, long, short = torch.ones(5 * KB, device="vgpu:0"), neg(10), neg(2)
    with vgpu.record(COSTS) as timeline:
        long()
        with torch.vgpu.stream(side):
            short()
        third.wait_stream(torch.vgpu.default_stream("vgpu:0"))
        with torch.vgpu.stream(third):
            sent.to("vgpu:1")
    copy = next(event for event in timeline.of("vgpu:0") if event.kind == "copy")
    assert copy.start_s * 1e6 == pytest.approx(25)
    assert vgpu.replay(timeline).events == timeline.events
