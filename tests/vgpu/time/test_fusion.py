"""Fused elementwise chains: what's launched, and how many bytes it moves."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from toy_gpu import COSTS, LAUNCH_S, SPEC, near

import vgpu
from vgpu.time import recording

FUSED = dataclasses.replace(COSTS, fuses=True)
SIDE = 25
KILO = 4 * SIDE * SIDE  # bytes of a matrix

pytestmark = pytest.mark.virtual_gpus(1, gpu=SPEC)


def matrix():
    return torch.rand(SIDE, SIDE, device="vgpu")


def launched(timeline):
    return [(event.name, event.size_bytes) for event in timeline.events]


def test_a_chain_reads_its_inputs_and_writes_its_result():
    x, w = matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        y = (x * 2 + 1).relu() @ w
    assert launched(timeline) == [("fused", 2 * KILO), ("mm", 3 * KILO)]
    fused, product = timeline.events
    assert (fused.launch_s, fused.duration_s) == (near(LAUNCH_S), near(2 * KILO * 1e-9))
    assert product.start_s == fused.end_s
    torch.testing.assert_close(y, torch.relu(x * 2 + 1) @ w)


def both_are_needed(x, y, w):
    z = x + y
    return z @ w, x @ w, z @ w


def change_in_place(x, y, w):
    x.mul_(2).add_(1)
    x @ w


def overwrite(x, y, w):
    z = x + 1
    z.mul_(2)
    z @ w


def write_both_halves_of_a_block(x, y, w):
    whole = torch.empty(2 * SIDE, SIDE, device="vgpu")
    whole[:SIDE].copy_(x)
    whole[SIDE:].copy_(x)
    return whole


def need_an_intermediate_result(x, y, w):
    z = x * 2
    (z + x) @ w
    z @ w  # recomputed from x


# For each case, the number of matrices that each fused kernel reads and writes.
CHAINS = {
    "a reduction is part of a chain": (lambda x, y, w: (x / x.sum(-1, keepdim=True)) @ w, [2]),
    "both inputs of a chain are read": (lambda x, y, w: (x * 2 + y * 3) @ w, [3]),
    "what multiple matmuls need is written once": (both_are_needed, [3]),
    "an intermediate result is computed again": (need_an_intermediate_result, [2, 2]),
    "an in-place change is part of a chain": (change_in_place, [2]),
    "an overwritten result is never written": (overwrite, [2]),
    "what outlives the recording is written": (lambda x, y, w: x.neg().abs(), [2]),
    "both halves of a block are written": (write_both_halves_of_a_block, [2, 2]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_launched_when_its_result_is_needed(name):
    program, sizes = CHAINS[name]
    x, y, w = matrix(), matrix(), matrix()
    with vgpu.record(FUSED) as timeline:
        kept = program(x, y, w)
    fused = [size_bytes for name, size_bytes in launched(timeline) if name == "fused"]
    assert fused == [size * KILO for size in sizes]
    del kept


def test_complex_numbers_are_not_fused_as_with_torch_compile():
    x, turn = torch.rand(SIDE, 2, device="vgpu"), torch.ones(SIDE, device="vgpu") * 1j
    with vgpu.record(FUSED) as timeline:
        turned = torch.view_as_real(torch.view_as_complex(x * 2) * turn) + 1
    vector = 4 * 2 * SIDE
    assert launched(timeline) == [("fused", 2 * vector), ("mul", 3 * vector), ("fused", 2 * vector)]
    del turned


def test_operations_with_unused_results_are_never_launched():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        x.neg().abs()
    assert timeline.events == []


def test_recordings_include_matmuls_with_out_and_sparse_operands():
    x, w, y = matrix(), matrix(), matrix()
    sparse = torch.eye(SIDE, device="vgpu").to_sparse()
    with vgpu.record(FUSED) as timeline:
        torch.mm(x, w, out=y)
        sparse @ w
    assert launched(timeline)[0][0] == "mm"
    torch.testing.assert_close(y, x @ w)


def test_halves_of_one_tensor_are_read_once():
    x, w = matrix(), torch.rand(10, 5, device="vgpu")
    left, right = x[:, :10], x[:, 10:20]
    with vgpu.record(FUSED) as timeline:
        (left * right) @ w
    assert launched(timeline)[0] == ("fused", 3 * 4 * SIDE * 10)


def test_a_gradient_from_another_stream_is_written_before_it_is_copied():
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
        x.neg()  # the last operation that reads x, which outlives it
    assert launched(timeline) == [("fused", 2 * KILO)]
    assert timeline.events[0].stream == other.stream_id
    assert z.device == x.device


@pytest.mark.parametrize("costs", [COSTS, FUSED], ids=["plain", "fused"])
def test_tensors_that_outlive_a_recording_do_not_keep_it_alive(costs):
    read, changed = matrix(), matrix()
    with vgpu.record(costs):
        program = weakref.ref(recording.under_way.program)
        made = read * 2
        changed.add_(1)
    gc.collect()
    assert program() is None
    assert made.device == read.device == changed.device


def test_a_wait_launches_the_other_streams_deferred_operations():
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


def test_an_operation_deferred_before_a_wait_does_not_wait():
    x, other = matrix(), torch.Stream("vgpu")
    of_host = torch.rand(20 * SIDE, SIDE).pin_memory()
    with vgpu.record(FUSED) as timeline:
        with other:
            copied = of_host.to("vgpu", non_blocking=True)
        y = x * 2
        torch.accelerator.current_stream().wait_event(other.record_event())
        z = y + copied[:SIDE]
    before, after = (event for event in timeline.events if event.name == "fused")
    copy = next(event for event in timeline.events if event.kind == "copy")
    assert before.end_s < copy.end_s <= after.start_s
    assert z.device == y.device


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


def test_the_host_waits_for_a_value():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        total = (x * 2).sum().item()
    assert next(event.name for event in timeline.events if event.kind == "kernel") == "fused"
    assert timeline.host_s >= KILO * 1e-9
    assert total == pytest.approx(2 * x.sum().item())


def test_a_query_launches_deferred_operations():
    x = matrix()
    with vgpu.record(FUSED) as timeline:
        y = x * 2 + 1
        assert not torch.vgpu.current_stream().query()
        vgpu.spend(1)
        assert torch.vgpu.current_stream().query()
    assert launched(timeline) == [("fused", 2 * KILO)]
    assert y.device == x.device


def test_long_chains_are_split():
    parts, w = [matrix() for _ in range(20)], matrix()
    with vgpu.record(FUSED) as timeline:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        total @ w
    fused = [size for name, size in launched(timeline) if name == "fused"]
    # First eight at once; then the sum so far and seven more, or what's left. Each writes one.
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


def test_a_training_step_moves_fewer_bytes():
    with vgpu.shapes_only():
        layers = nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)
        model = nn.Sequential(*layers).to("vgpu")
        x = torch.empty(32, 64, device="vgpu")

        def step(costs):
            model.zero_grad()
            with vgpu.record(costs) as timeline:
                model(x).square().mean().backward()
            assert timeline.races == []
            return timeline

        plain, fused = step(COSTS), step(FUSED)
    assert fused.flop == plain.flop
    assert sum(e.size_bytes for e in fused.events) < sum(e.size_bytes for e in plain.events)
    assert fused.makespan_s < plain.makespan_s
