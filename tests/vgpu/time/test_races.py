"""A stream that doesn't wait reads garbage or is at least reported, deterministically."""

import pytest
import torch
from torch import nn

import vgpu

pytestmark = pytest.mark.virtual_gpus(2)


def passed_on(waits):
    """Create values on the default stream of vgpu:0, and copy them to vgpu:1 on another stream."""
    side = torch.vgpu.Stream("vgpu:0")
    ones = torch.ones(2**20, device="vgpu:0")
    with vgpu.record() as timeline:
        made = ones + ones
        if waits:
            side.wait_stream(torch.vgpu.current_stream("vgpu:0"))
        with torch.vgpu.stream(side):
            moved = made.to("vgpu:1")
    return moved, timeline.races


def test_a_copy_that_does_not_wait_moves_garbage():
    moved, (race,) = passed_on(waits=False)
    assert moved.isnan().all().item()
    assert (race.operation, race.other_operation, race.other_stream) == ("copy", "add", 0)
    assert "wait_stream" in str(race) and "vgpu:0" in str(race)
    moved, races = passed_on(waits=True)
    assert (moved == 2).all().item() and races == []


def test_a_copy_of_a_shape_is_checked_like_one_of_values():
    with vgpu.shapes_only():
        found = [[race.operation for race in passed_on(waits)[1]] for waits in (False, True)]
    assert found == [["copy"], []]


def write_over_a_read(x, weight, main, side):
    side.wait_stream(main)
    with side:
        x.sum()
    x.zero_()


def read_too_early(x, weight, main, side):
    with side:
        made = x * 2
    return made @ weight


def read_in_time(x, weight, main, side):
    with side:
        made = x * 2
    main.wait_stream(side)
    return made @ weight


RACES = [
    (write_over_a_read, [("zero_", "sum")]),
    (read_too_early, [("mm", "mul")]),
    (read_in_time, []),
]


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize(("program", "wanted"), RACES)
def test_fused_operations_have_the_same_races_as_others(program, wanted, fuses):
    main, side = torch.vgpu.current_stream("vgpu:0"), torch.vgpu.Stream("vgpu:0")
    x, weight = torch.ones(2, 64, 64, device="vgpu:0")
    with vgpu.record(fuses=fuses) as timeline:
        program(x, weight, main, side)
    assert [(race.operation, race.other_operation) for race in timeline.races] == wanted


def test_a_race_without_overlap_in_time_is_still_reported():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(4, device="vgpu:0")
    with vgpu.record() as timeline:
        y = x + x
        vgpu.spend(1.0)  # by now, the addition has long finished
        with torch.vgpu.stream(side):
            z = y * 3
    assert z.tolist() == [6.0] * 4
    assert [race.operation for race in timeline.races] == ["mul"]


def wait_through_a_third_stream(stream, side):
    third = torch.vgpu.Stream("vgpu:0")
    third.wait_event(stream.record_event())
    side.wait_event(third.record_event())


@pytest.mark.parametrize(
    "synchronize",
    [
        lambda stream, side: torch.vgpu.synchronize("vgpu:0"),
        lambda stream, side: stream.record_event().synchronize(),
        wait_through_a_third_stream,
    ],
    ids=["device", "event", "third stream"],
)
def test_the_host_and_other_streams_can_order_streams(synchronize):
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(4, device="vgpu:0")
    with vgpu.record() as timeline:
        y = x + x
        synchronize(torch.vgpu.current_stream("vgpu:0"), side)
        with torch.vgpu.stream(side):
            y * 3
    assert timeline.races == []


@pytest.mark.parametrize("fuses", [False, True])
def test_the_first_operation_of_a_second_stream_can_race(fuses):
    side = torch.vgpu.Stream("vgpu:0")
    x, weight = torch.ones(2, 64, 64, device="vgpu:0")
    with vgpu.record(fuses=fuses) as timeline:
        written = torch.vgpu.current_stream("vgpu:0").record_event()
        product = x @ weight
        side.wait_event(written)  # but not for the matmul, which reads x
        with torch.vgpu.stream(side):
            x.mul_(2)
    (race,) = timeline.races
    assert (race.operation, race.other_operation) == ("mul_", "mm")
    assert product.device == x.device


def test_a_backward_pass_launches_deferred_operations_of_both_streams_before_one_waits():
    side, main = torch.vgpu.Stream("vgpu:0"), torch.vgpu.current_stream("vgpu:0")
    x, weight = torch.ones(2, 64, 64, device="vgpu:0")
    with vgpu.record(fuses=True) as timeline:
        y = x.requires_grad_().sin()
        side.wait_stream(main)
        with side:
            product = y @ weight
        main.wait_stream(side)
        (y.cos() * product).sum().backward()
    launched = [(event.name, event.stream) for event in timeline.events if event.backward]
    there = side.stream_id
    # First the matmul's input, then cos's part of y's gradient, to which ``side`` adds.
    assert launched == [("fused", 0), ("fused", 0), ("mm", there), ("fused", there), ("fused", 0)]
    assert timeline.races == []


def test_an_in_place_operation_on_unfinished_values_leaves_garbage():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(2**20, device="vgpu:0")
    with vgpu.record():
        y = x + x
        with torch.vgpu.stream(side):
            y.add_(1)
    assert y.isnan().all().item()


def test_a_tensor_written_before_the_recording_is_ready():
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record():
        x = torch.ones(4, device="vgpu:0") + 1
    with vgpu.record() as timeline, torch.vgpu.stream(side):
        y = x * 3
    assert y.tolist() == [6.0] * 4 and timeline.races == []


def test_backward_runs_on_the_forward_streams_and_waits_by_itself():
    side = torch.vgpu.Stream("vgpu:0")
    layer = nn.Linear(8, 8).to("vgpu:0")
    x = torch.ones(4, 8, device="vgpu:0")
    with vgpu.record() as timeline:
        side.wait_stream(torch.vgpu.current_stream("vgpu:0"))
        with torch.vgpu.stream(side):
            y = layer(x)
        torch.vgpu.current_stream("vgpu:0").wait_stream(side)
        y.square().sum().backward()
        gradient = layer.weight.grad + 0
    streams = {e.name: e.stream for e in timeline.events if e.backward}
    assert streams["mm"] == side.stream_id and streams["pow"] == 0
    assert timeline.races == []
    reference = nn.Linear(8, 8)
    reference.load_state_dict({k: v.cpu() for k, v in layer.state_dict().items()})
    reference(torch.ones(4, 8)).square().sum().backward()
    torch.testing.assert_close(gradient.cpu(), reference.weight.grad)


def test_default_streams_need_no_waits():
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8).to("vgpu:0"), nn.Linear(8, 2).to("vgpu:1")
    with vgpu.record() as timeline:
        for piece in torch.randn(12, 8).to("vgpu:0").split(3):
            second(first(piece).to("vgpu:1")).sum().backward()
    assert timeline.races == []


def test_a_copys_gradient_is_copied_on_its_targets_stream():
    out, into = torch.vgpu.Stream("vgpu:0"), torch.vgpu.Stream("vgpu:1")
    x = torch.ones(4, device="vgpu:0", requires_grad=True)
    with vgpu.record() as timeline:
        with out, into:
            moved = x.to("vgpu:1")
        torch.vgpu.current_stream("vgpu:1").wait_stream(into)
        moved.square().sum().backward()
    streams = {
        (str(e.device), e.stream) for e in timeline.events if e.kind == "copy" and e.backward
    }
    # The engine makes the stream of the copy's result current; on vgpu:0, it's the default one.
    assert streams == {("vgpu:1", into.stream_id), ("vgpu:0", 0)}
    assert timeline.races == []


def test_a_query_loop_ends_and_orders_the_host():
    with vgpu.record() as timeline:
        x = torch.ones(1000, 1000, device="vgpu:0")
        stream, event = torch.vgpu.Stream(), torch.vgpu.Event()
        stream.wait_stream(torch.vgpu.current_stream())
        with torch.vgpu.stream(stream):
            y = x @ x
            event.record()
            z = y @ x
        asked = sum(1 for _ in iter(event.query, True))
        _ = y + 1
        asked += sum(1 for _ in iter(stream.query, True))
        _ = z + 1
    assert 0 < asked < 1000
    assert timeline.races == []
