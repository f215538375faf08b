"""Elementwise chains that go once through memory: what is launched, and how many bytes it moves."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from toy_gpu import COSTS, LAUNCH_S, SPEC, near

import vgpu
from vgpu.time import recording
from vgpu.time.compiler_passes import Fusion

FUSED = dataclasses.replace(COSTS, fuses=True)
SIDE = 25
KILO = 4 * SIDE * SIDE  # bytes of a matrix

pytestmark = pytest.mark.virtual_gpus(1, gpu=SPEC)


def matrix():
    return torch.rand(SIDE, SIDE, device="vgpu")


def launched(timeline):
    return [(event.name, event.size_bytes) for event in timeline.events]


def test_a_chain_reads_its_beginning_and_writes_its_end():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        y = (x * 2 + 1).relu() @ w
    assert launched(timeline) == [("fused", 2 * KILO), ("mm", 3 * KILO)]
    fused, product = timeline.events
    assert (fused.launch_s, fused.duration_s) == (near(LAUNCH_S), near(2 * KILO * 1e-9))
    assert product.start_s == fused.end_s
    torch.testing.assert_close(y, torch.relu(x * 2 + 1) @ w)


def test_products_into_a_tensor_and_of_a_sparse_one_are_recorded():
    x, w, y = matrix(), matrix(), matrix()
    sparse = torch.eye(SIDE, device="vgpu").to_sparse()
    with vgpu.record(FUSED) as timeline:
        torch.mm(x, w, out=y)
        sparse @ w
    assert launched(timeline)[0][0] == "mm"
    torch.testing.assert_close(y, x @ w)


def test_a_result_that_several_operations_need_is_written_once():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        y = x * 2
        y @ w, y @ w
    assert [name for name, _ in launched(timeline)] == ["fused", "mm", "mm"]


def test_an_intermediate_result_is_computed_again():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        y = x * 2
        z = y + x
        z @ w
        y @ w
    fused = [size for name, size in launched(timeline) if name == "fused"]
    assert fused == [2 * KILO, 2 * KILO]  # x is read and z is written; then x and y


def test_a_reduction_is_part_of_a_chain():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        (x / x.square().mean(-1, keepdim=True).sqrt()) @ w
    assert launched(timeline)[0] == ("fused", 2 * KILO)


def test_two_beginnings_are_both_read():
    x, y, w = matrix(), matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        (x * 2 + y * 3) @ w
    assert launched(timeline)[0] == ("fused", 3 * KILO)


def test_halves_of_one_tensor_are_one_reading():
    x, w = matrix(), torch.rand(10, 5, device="vgpu")
    left, right = x[:, :10], x[:, 10:20]
    with vgpu.record(FUSED) as timeline:
        (left * right) @ w
    assert launched(timeline)[0] == ("fused", 3 * 4 * SIDE * 10)


def test_a_result_that_nobody_needs_is_never_launched():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        x.neg().abs()
    assert timeline.events == []


def test_an_overwritten_result_is_never_written():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        y = x + 1
        y.mul_(2)
        y @ w
    assert launched(timeline) == [("fused", 2 * KILO), ("mm", 3 * KILO)]


def test_both_halves_of_a_block_are_written():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        whole = torch.empty(2 * SIDE, SIDE, device="vgpu")
        whole[:SIDE].copy_(x)
        whole[SIDE:].copy_(x)
    assert launched(timeline) == [("fused", 2 * KILO)] * 2


def test_a_gradient_of_another_stream_is_in_memory_before_it_is_copied():
    x, w, side = matrix().requires_grad_(), matrix(), torch.Stream("vgpu")
    with vgpu.record(FUSED) as timeline:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = (x * 2) @ w
        torch.accelerator.current_stream().wait_stream(side)
        y.sum().backward()
        x.grad.cpu()
    *_, last = (event for event in timeline.events if event.kind == "kernel")
    (copy,) = (event for event in timeline.events if event.kind == "copy")
    assert (last.name, last.stream) == ("fused", side.stream_id)
    assert copy.start_s == last.end_s


def test_a_read_does_not_keep_an_earlier_result_alive():
    x, y, other = matrix(), matrix(), torch.Stream("vgpu")
    with vgpu.record(FUSED) as timeline:
        with other:
            z = y * 2
        x.neg()  # the last that reads x, which lives on
    assert launched(timeline) == [("fused", 2 * KILO)]
    assert timeline.events[0].stream == other.stream_id
    assert z.device == x.device


@pytest.mark.parametrize("costs", [COSTS, FUSED], ids=["plain", "fused"])
def test_tensors_that_live_on_keep_no_recording_alive(costs):
    read, changed = matrix(), matrix()
    with vgpu.record(costs):
        recorder = weakref.ref(recording.under_way.program)
        made = read * 2
        changed.add_(1)
    gc.collect()
    assert recorder() is None
    assert made.device == read.device == changed.device


def test_a_result_that_outlives_the_recording_is_written():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        y = x.neg().abs()
    assert launched(timeline) == [("fused", 2 * KILO)]
    assert timeline.makespan_s == near(LAUNCH_S + 2 * KILO * 1e-9)
    assert y.device == x.device


def test_a_wait_launches_what_the_other_stream_has_deferred():
    x, w = matrix(), matrix()
    other = torch.Stream("vgpu")
    with vgpu.record(FUSED) as timeline:
        y = x * 2
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            y @ w
    fused, product = timeline.events
    assert (fused.stream, product.start_s) == (0, fused.end_s)
    assert timeline.races == []


STREAM_WAITS = {
    "stream": lambda waiting, other: waiting.wait_stream(other),
    "event": lambda waiting, other: waiting.wait_event(other.record_event()),
    "event's wait": lambda waiting, other: other.record_event().wait(waiting),
}


@pytest.mark.parametrize("name", STREAM_WAITS)
def test_an_operation_deferred_before_a_wait_does_not_wait(name):
    x, other = matrix(), torch.Stream("vgpu")
    of_host = torch.rand(20 * SIDE, SIDE).pin_memory()
    with vgpu.record(FUSED) as timeline:
        with other:
            copied = of_host.to("vgpu", non_blocking=True)
        y = x * 2
        STREAM_WAITS[name](torch.accelerator.current_stream(), other)
        z = y + copied[:SIDE]
    before, after = (event for event in timeline.events if event.name == "fused")
    copy = next(event for event in timeline.events if event.kind == "copy")
    assert before.end_s < copy.end_s <= after.start_s
    assert z.device == y.device


def test_the_host_waits_for_a_value():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        total = (x * 2).sum().item()
    assert next(event.name for event in timeline.events if event.kind == "kernel") == "fused"
    assert timeline.host_s >= KILO * 1e-9
    assert total == pytest.approx(2 * x.sum().item())


WAITS = {
    "GPU": lambda: torch.vgpu.synchronize(),
    "stream": lambda: torch.vgpu.current_stream().synchronize(),
    "event": lambda: torch.vgpu.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_host_that_waits_for_a_gpu_waits_for_deferred_operations(name):
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        y = x * 2 + 1
        WAITS[name]()
    assert sorted(launched(timeline)) == [("fused", 2 * KILO), ("synchronize", 0)]
    assert timeline.host_s == timeline.makespan_s == near(LAUNCH_S + 2 * KILO * 1e-9)
    assert y.device == x.device


def test_a_query_launches_deferred_operations():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        y = x * 2 + 1
        assert not torch.vgpu.current_stream().query()
        vgpu.spend(1)
        assert torch.vgpu.current_stream().query()
    assert launched(timeline) == [("fused", 2 * KILO)]
    assert y.device == x.device


def test_a_change_in_place_is_part_of_the_chain():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        x.mul_(2).add_(1)
        x @ w
    assert launched(timeline) == [("fused", 2 * KILO), ("mm", 3 * KILO)]


def test_long_chains_are_cut():
    parts, w = [matrix() for _ in range(20)], matrix()
    with vgpu.record(FUSED) as timeline:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        total @ w
    fused = [size for name, size in launched(timeline) if name == "fused"]
    # The first nine at once; then the sum so far and seven more, or what is left.
    assert fused == [9 * KILO, 9 * KILO, 7 * KILO]


def test_a_replay_keeps_what_was_fused():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        (x * 2 + 1) @ w
    again = vgpu.replay(timeline, memory_share=0.5)
    assert launched(again) == launched(timeline)
    assert again.events[0].duration_s == near(2 * timeline.events[0].duration_s)
    with pytest.raises(ValueError, match=r"record\(fuses="):
        vgpu.replay(timeline, fuses=False)


def test_a_program_can_be_fused_in_parts():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        recorder = recording.under_way.program
        y = (x * 2 + 1).relu() @ w
        y.neg()
        torch.vgpu.current_stream().record_event().synchronize()
    at_once, in_parts = Fusion().steps(recorder.steps), Fusion()
    assert at_once == [new for step in recorder.steps for new in in_parts.steps([step])]
    assert at_once == timeline.programs[0].steps
    assert len(at_once) < len(recorder.steps)


@pytest.mark.parametrize("shapes", [True, False])
def test_a_training_step_moves_fewer_bytes(shapes):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    model.to("vgpu")
    x = torch.rand(32, 64, device="vgpu")

    def step(costs):
        model.zero_grad()
        with vgpu.record(costs) as timeline:
            model(x).square().mean().backward()
        assert timeline.races == []
        return timeline

    if shapes:
        with vgpu.shapes_only():
            model.to("vgpu")
            x = torch.empty(32, 64, device="vgpu")
            plain, fused = step(COSTS), step(FUSED)
    else:
        plain, fused = step(COSTS), step(FUSED)
    assert fused.flop == plain.flop
    assert sum(e.size_bytes for e in fused.events) < sum(e.size_bytes for e in plain.events)
    assert fused.makespan_s < plain.makespan_s
