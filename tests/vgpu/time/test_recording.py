"""Virtual time: hosts, streams, events and copies, compared with times computed by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from toy_gpu import COSTS, KB, LAUNCH_S, SPEC, near

import vgpu
from vgpu.time import recording
from vgpu.time.resources import Resource
from vgpu.time.simulate import Simulator
from vgpu.time.timeline import covered_s

pytestmark = pytest.mark.virtual_gpus(2, gpu=SPEC)


def kernels(timeline, device):
    return [event for event in timeline.of(device) if event.kind == "kernel"]


def test_launches_run_ahead_of_the_gpu():
    x = torch.ones(KB, device="vgpu:0")
    with vgpu.record(COSTS) as timeline:
        y = x.neg()  # reads 1 kB, writes 1 kB: 2 µs
        y.neg()
    first, second = timeline.events
    assert (first.start_s, first.end_s) == (near(1e-6), near(3e-6))
    assert (second.launch_s, second.start_s, second.end_s) == (near(2e-6), near(3e-6), near(5e-6))
    assert timeline.host_s == near(2e-6)
    assert timeline.makespan_s == near(5e-6)
    assert timeline.busy_s("vgpu:0") == near(4e-6)
    assert timeline.utilization("vgpu:0") == near(0.8)
    assert timeline.utilization("vgpu:1") == 0


def test_views_launch_nothing():
    x = torch.ones(10, 10, device="vgpu:0")
    with vgpu.record(COSTS) as timeline:
        x.t().view(-1, 5, 2).split(2)[0].detach()
        torch.empty(100, device="vgpu:0")
        held = torch.vgpu.memory_allocated("vgpu:0")
        # Their schemas hide that these are views.
        views = torch.ops.aten._unsafe_view(x, [100]), x.unsafe_split(2)
        assert torch.vgpu.memory_allocated("vgpu:0") == held and views
    assert timeline.events == [] and timeline.makespan_s == 0


def test_a_copy_between_two_equal_views_launches_nothing():
    for shapes in (False, True):
        with vgpu.shapes_only() if shapes else nullcontext():
            x = torch.ones(10, 10, device="vgpu:0")
            host = torch.ones(10)
            with vgpu.record(COSTS) as timeline:
                x[2:4].copy_(x[2:4])
                x.view(100)[20:40].copy_(x[2:4].flatten())
                host[2:4].copy_(host[2:4])
            assert timeline.events == []
            with vgpu.record(COSTS) as timeline:
                x[2:4].copy_(x[4:6])
                x[2:4].copy_(torch.empty(2, 10, device="vgpu:0"))
            assert [event.name for event in timeline.events] == ["copy"] * 2


def test_a_batched_matmul_launches_one_operation():
    x, weight = torch.ones(2, 3, 4, device="vgpu:0"), torch.ones(4, 5, device="vgpu:0")
    for shapes in (False, True):
        with vgpu.shapes_only() if shapes else nullcontext():
            with vgpu.record(COSTS) as timeline:
                held = torch.vgpu.memory_allocated("vgpu:0")
                y = x @ weight  # a view of x, mm, and _unsafe_view of the result
                assert torch.vgpu.memory_allocated("vgpu:0") - held == 512
            assert [event.name for event in timeline.events] == ["mm"]
            assert y.shape == (2, 3, 5)
            del y


def test_item_makes_the_host_wait():
    x = torch.ones(KB, device="vgpu:0")
    with vgpu.record(COSTS) as timeline:
        y = x.neg()
        y[0].item()
        x.neg()
    wait = next(event for event in timeline.events if event.kind == "wait")
    assert wait.name == "_local_scalar_dense" and wait.device.type == "cpu"
    last = kernels(timeline, "vgpu:0")[-1]
    assert last.start_s == near(wait.end_s + LAUNCH_S)


def put(x, where, values):
    x[where] = values


INDEXED = {
    "integers": (lambda x, mask: x[mask.nonzero()[:, 0]], ["nonzero"]),
    "integers on the host": (lambda x, mask: x[[0, 2]], ["copy"]),
    "mask": (lambda x, mask: x[mask], ["nonzero"]),
    "integers put": (lambda x, mask: put(x, mask.nonzero()[:, 0], x.new_ones(KB)), ["nonzero"]),
    "mask put": (lambda x, mask: put(x, mask, x.new_ones(KB)), ["nonzero"]),
    "mask filled": (lambda x, mask: put(x, mask, 0.5), []),
}


@pytest.mark.parametrize("name", INDEXED)
def test_the_host_waits_for_masks_but_not_for_integers(name):
    call, waited_for = INDEXED[name]
    x, mask = torch.ones(2 * KB).to("vgpu:0"), torch.arange(2 * KB).lt(KB).to("vgpu:0")
    with vgpu.record(COSTS) as timeline:
        x.neg()
        call(x, mask)
    assert [event.name for event in timeline.events if event.kind == "wait"] == waited_for


def test_a_mask_makes_the_host_wait_in_shapes_only_too():
    with vgpu.shapes_only(), vgpu.record(COSTS) as timeline:
        x = torch.ones(2 * KB, device="vgpu:0")
        put(x, x.to(torch.int64)[:2], x[:2])
        put(x, x > 0, x[:KB])
        put(x, x > 0, 0.5)  # masked_fill
        table = x.reshape(2, KB)
        put(table, (table[:, 0] > 0, table[0, :2] > 0), 0.5)  # two masks can't become one
    assert [event.name for event in timeline.events if event.kind == "wait"] == ["index_put_"] * 2


def test_synchronize_waits_for_one_device():
    x = torch.ones(KB, device="vgpu:0")
    y = torch.ones(4 * KB, device="vgpu:1")
    with vgpu.record(COSTS) as timeline:
        x.neg()
        y.neg()
        torch.vgpu.synchronize("vgpu:0")
    assert timeline.host_s == near(3e-6)
    assert timeline.makespan_s == near(10e-6)


def test_a_copy_occupies_the_current_streams_of_both_gpus():
    x = torch.ones(KB, device="vgpu:0")
    y = torch.ones(8 * KB, device="vgpu:1")
    with vgpu.record(COSTS) as timeline:
        y.neg()  # vgpu:1 is busy until 1 + 16 µs
        z = x.to("vgpu:1")  # so the copy starts there at 17 µs, and takes 1 µs
        x.neg()  # vgpu:0 waits for it, too
        z.neg()
    copies = [event for event in timeline.events if event.kind == "copy"]
    assert [event.device.index for event in copies] == [0, 1]
    assert all((e.start_s, e.end_s) == (near(17e-6), near(18e-6)) for e in copies)
    assert copies[0].source.index == 0 and copies[0].target.index == 1
    assert kernels(timeline, "vgpu:0")[0].start_s == near(18e-6)
    assert kernels(timeline, "vgpu:1")[1].start_s == near(18e-6)
    assert timeline.host_s == near(4e-6)  # the host continued
    assert timeline.copying_s("vgpu:0") == near(1e-6)


def test_a_copy_uses_the_links_between_its_two_gpus():
    x = torch.ones(KB, device="vgpu:0")
    wires = vgpu.Link("wires", 1e9, 0.0, "made for this test", pair_bytes_per_s=0.25e9)
    with vgpu.record(COSTS, link=wires) as timeline:
        x.to("vgpu:1")
    assert timeline.copying_s("vgpu:0") == near(4e-6)


def test_copies_from_the_host_block_unless_pinned_and_non_blocking():
    plain, pinned = torch.ones(KB), torch.ones(KB).pin_memory()
    host_s = []
    for source, non_blocking in ((plain, False), (plain, True), (pinned, False), (pinned, True)):
        with vgpu.record(COSTS) as timeline:
            source.to("vgpu:0", non_blocking=non_blocking)
        host_s.append(timeline.host_s)
    assert host_s == [near(2e-6), near(2e-6), near(2e-6), near(1e-6)]


def test_a_copy_to_the_host_waits_for_everything_before_it():
    x = torch.ones(KB, device="vgpu:0")
    with vgpu.record(COSTS) as timeline:
        x.neg().cpu()
    assert timeline.host_s == timeline.makespan_s == near(1e-6 + 2e-6 + 1e-6)


def test_streams_of_one_gpu_take_turns_and_copies_overlap_with_kernels():
    x = torch.ones(10 * KB, device="vgpu:0")
    y = torch.ones(5 * KB, device="vgpu:0")
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record(COSTS) as timeline:
        x.neg()  # 20 µs
        with torch.vgpu.stream(side):
            y.to("vgpu:1")  # 5 µs, while the kernel runs
            y.neg()  # 10 µs: only after the first kernel has finished
    main, other = kernels(timeline, "vgpu:0")
    copy = next(event for event in timeline.of("vgpu:0") if event.kind == "copy")
    assert (copy.stream, copy.start_s, copy.end_s) == (side.stream_id, near(2e-6), near(7e-6))
    assert other.start_s == near(main.end_s)
    assert timeline.streams("vgpu:0") == [0, side.stream_id]


def test_events_order_streams_and_measure_time():
    x = torch.ones(10 * KB, device="vgpu:0")
    y = torch.ones(KB, device="vgpu:1")
    start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    with vgpu.record(COSTS) as timeline:
        start.record(torch.vgpu.current_stream("vgpu:0"))
        x.neg()
        end.record(torch.vgpu.current_stream("vgpu:0"))
        assert not end.query()
        with pytest.raises(RuntimeError, match="must be completed before calculating elapsed"):
            start.elapsed_time(end)
        torch.vgpu.current_stream("vgpu:1").wait_event(end)
        y.neg()
        end.synchronize()
        assert end.query()
    assert kernels(timeline, "vgpu:1")[0].start_s == near(21e-6)
    assert start.elapsed_time(end) == near(21e-3)
    assert timeline.host_s == near(21e-6)
    end.record()
    with pytest.raises(RuntimeError, match="the other by the host's clock"):
        start.elapsed_time(end)


def test_an_event_on_an_idle_stream_happens_when_the_host_records_it():
    x = torch.ones(KB, device="vgpu:0")
    start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    with vgpu.record(COSTS):
        start.record()
        vgpu.spend(3e-6)
        end.record()
        assert start.elapsed_time(end) == near(3e-3)
        x.neg()  # launched after 4 µs, ends after 6
        end.record()
    assert start.elapsed_time(end) == near(6e-3)


def test_backward_is_launched_by_one_thread_per_device():
    a = torch.ones(KB, device="vgpu:0", requires_grad=True)
    b = torch.ones(KB, device="vgpu:1", requires_grad=True)
    loss = (b * b).sum() + (a * a).sum().to("vgpu:1")
    with vgpu.record(COSTS) as timeline:
        loss.backward()
    # The initial gradient, 1, is launched at 1 µs and copied at 2 µs. Then both threads continue
    # in parallel: two multiplications per square, and their sum.
    for gpu in ("vgpu:0", "vgpu:1"):
        launches = [e.launch_s for e in kernels(timeline, gpu) if e.name in ("mul", "add")]
        assert launches == [near(3e-6), near(4e-6), near(5e-6)]


def test_events_are_named_by_module_and_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).to("vgpu:0")
    x = torch.ones(3, 4, device="vgpu:0")
    with vgpu.record() as timeline:
        model(x).sum().backward()
    labels = [event.label for event in timeline.events]
    assert labels[:4] == ["0", "1.0", "1.1", "sum"]
    assert {"1.1 (backward)", "1.0 (backward)", "0 (backward)"} <= set(labels)
    assert timeline.events[0].name == "addmm" and timeline.events[0].flop == 2 * 3 * 4 * 4


def test_identical_runs_have_identical_timelines():
    def run():
        torch.manual_seed(0)
        model = nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to("vgpu:0"), [0, 1])
        with vgpu.record() as timeline:
            for _ in range(3):
                model(torch.randn(6, 8, device="vgpu:0")).sum().backward()
        return timeline

    first, second = run(), run()
    assert len(first.events) > 50
    assert first.events == second.events
    assert (first.makespan_s, first.host_s) == (second.makespan_s, second.host_s)


@pytest.mark.parametrize(
    ("locked_share", "count", "launches"),
    [
        (1.0, 2, 2),  # one after the other
        (1.0, 4, 4),
        (0.5, 2, 1),  # while one holds the lock, the other is in its operator
        (0.5, 4, 2),
        (0.25, 4, 1),
        (0.25, 8, 2),
    ],
)
def test_threads_queue_for_the_part_of_a_launch_that_holds_the_lock(locked_share, count, launches):
    with vgpu.enable(count, gpu=SPEC):
        model = nn.DataParallel(nn.Sequential(*[nn.ReLU()] * 10).to("vgpu:0"), range(count))
        x = torch.ones(count, KB, device="vgpu:0")
        with vgpu.record(COSTS, locked_share=locked_share) as timeline:
            model(x)
    relus = [e for e in timeline.events if e.name == "relu"]
    assert len(relus) == 10 * count
    first_s, last_s = min(e.launch_s for e in relus), max(e.launch_s for e in relus)
    assert last_s - first_s == near(launches * 9 * LAUNCH_S)


def test_spend_keeps_the_host_busy_and_record_accepts_costs_by_name():
    x = torch.ones(KB, device="vgpu:0")
    vgpu.spend(1.0)  # does nothing outside a recording
    with vgpu.record(COSTS, memory_share=0.5, link="PCIe 4") as timeline:
        vgpu.spend(0.25)
        x.neg()
    assert timeline.events[0].start_s == near(0.25 + 1e-6)
    assert timeline.events[0].duration_s == near(4e-6)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"duration_s .* got {wrong}"), vgpu.record():
            vgpu.spend(wrong)
    with pytest.raises(ValueError, match="link_share must be in"), vgpu.record(link_share=2):
        pass
    with pytest.raises(ValueError, match="no link preset 'PCI'"), vgpu.record(link="PCI"):
        pass


def test_a_recording_simulates_nothing_until_it_is_queried(monkeypatch):
    simulated = []
    run = Simulator.run

    def counting(simulator, steps):
        simulated.append(len(steps))
        run(simulator, steps)

    monkeypatch.setattr(Simulator, "run", counting)
    x, event = torch.ones(8, device="vgpu:0"), torch.vgpu.Event()
    with vgpu.record() as timeline:
        x.neg()
        event.record()
        torch.vgpu.synchronize("vgpu:0")
        assert simulated == []
        assert event.query()
        assert 0 < sum(simulated) < len(recording.under_way.program.steps)
        x.neg()
    assert simulated[-1] == len(timeline.programs[0].steps)


def test_a_nested_recording_is_rejected():
    with vgpu.record(), pytest.raises(RuntimeError, match="already active"), vgpu.record():
        pass
    x = torch.ones(2, device="vgpu:0")
    with vgpu.record() as timeline:  # the failed one left nothing behind
        x.neg()
    assert len(timeline.events) == 1


def test_a_resource_fills_gaps_and_never_does_two_things_at_once():
    unit = Resource()
    assert unit.place(0.0, 1.0) == 0.0
    assert unit.place(5.0, 1.0) == 5.0
    assert unit.place(0.5, 2.0) == 1.0  # into the gap, after the first
    assert unit.place(0.0, 3.0) == 6.0  # too long for what's left of it
    assert unit.place(0.0, 2.0) == 3.0  # just fits
    assert (unit.starts, unit.ends) == ([0.0], [9.0])


def test_busy_time_counts_overlaps_once():
    x = torch.ones(KB, device="vgpu:0")
    with vgpu.record(COSTS) as timeline:
        x.neg()
    event = timeline.events[0]
    later = event._replace(start_s=event.start_s + 1e-6, end_s=event.end_s + 1e-6)
    assert covered_s([later, event, event]) == near(3e-6)


def test_an_operator_with_its_own_kernel_launches_one_kernel():
    """C++ can also compose silu_backward from other operators; CUDA and the CPU have one kernel."""
    x = torch.rand(KB, device="vgpu:0", requires_grad=True)
    y = torch.nn.functional.silu(x)
    with vgpu.record(COSTS) as timeline:
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    names = [event.name for event in kernels(timeline, "vgpu:0")]
    assert names.count("silu_backward") == 1
    assert not {"sigmoid", "sub_", "mul"} & set(names)
    sigmoid = x.sigmoid()
    torch.testing.assert_close(gradient, sigmoid * (1 + x * (1 - sigmoid)))
