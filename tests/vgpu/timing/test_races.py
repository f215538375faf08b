"""A stream that forgets to wait reads garbage, or is at least reported; always in the same way."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from helpers import vgpu

pytestmark = pytest.mark.virtual_gpus(2)


def pass_on(synchronize):
    """Make values on the default stream of vgpu:0, and copy them to vgpu:1 on another stream."""
    side = torch.vgpu.Stream("vgpu:0")
    ones = torch.ones(2**20, device="vgpu:0")
    with vgpu.record() as timeline:
        made = ones + ones
        if synchronize:
            side.wait_stream(torch.vgpu.current_stream("vgpu:0"))
        with torch.vgpu.stream(side):
            moved = made.to("vgpu:1")
        total = moved.sum()
    return total.item(), timeline


def test_a_copy_that_does_not_wait_moves_garbage():
    total, timeline = pass_on(synchronize=False)
    assert total != total  # NaN
    (race,) = timeline.races
    assert (race.operation, race.other_operation, race.other_stream) == ("copy", "add", 0)
    assert "wait_stream" in str(race) and "vgpu:0" in str(race)


def test_a_copy_that_waits_moves_the_values():
    total, timeline = pass_on(synchronize=True)
    assert total == 2 * 2**20
    assert timeline.races == []


def test_the_same_race_gives_the_same_record():
    (_, first), (_, second) = pass_on(False), pass_on(False)
    times = [[(e.name, e.start_s, e.end_s) for e in t.events] for t in (first, second)]
    assert times[0] == times[1]
    assert len(first.races) == len(second.races) == 1


def test_a_race_that_ends_well_by_the_times_is_still_reported():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(4, device="vgpu:0")
    with vgpu.record() as timeline:
        y = x + x
        vgpu.spend(1.0)  # on this day it has long ended
        with torch.vgpu.stream(side):
            z = y * 3
    assert z.tolist() == [6.0] * 4
    assert [race.operation for race in timeline.races] == ["mul"]


def test_a_host_that_waits_orders_streams():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(4, device="vgpu:0")
    with vgpu.record() as timeline:
        y = x + x
        torch.vgpu.synchronize("vgpu:0")
        with torch.vgpu.stream(side):
            y * 3
    assert timeline.races == []


def test_events_order_through_a_third_stream():
    first, second = torch.vgpu.Stream("vgpu:0"), torch.vgpu.Stream("vgpu:0")
    x = torch.ones(4, device="vgpu:0")
    with vgpu.record() as timeline:
        y = x + x
        first.wait_event(torch.vgpu.current_stream("vgpu:0").record_event())
        second.wait_event(first.record_event())
        with torch.vgpu.stream(second):
            y * 3
    assert timeline.races == []


def test_writing_over_what_another_stream_still_reads_is_reported():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(2**20, device="vgpu:0")
    with vgpu.record() as timeline:
        side.wait_stream(torch.vgpu.current_stream("vgpu:0"))
        with torch.vgpu.stream(side):
            x.sum()
        x.zero_()
    (race,) = timeline.races
    assert (race.operation, race.other_operation) == ("zero_", "sum")


def test_an_operation_in_place_on_unfinished_values_leaves_garbage():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(2**20, device="vgpu:0")
    with vgpu.record():
        y = x + x
        with torch.vgpu.stream(side):
            y.add_(1)
    assert y.isnan().all().item()


def test_what_was_written_before_the_recording_is_ready():
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record():
        x = torch.ones(4, device="vgpu:0") + 1
    with vgpu.record() as timeline, torch.vgpu.stream(side):
        y = x * 3
    assert y.tolist() == [6.0] * 4 and timeline.races == []


def test_the_backward_pass_runs_on_the_streams_of_the_forward_and_waits_by_itself():
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


def test_default_streams_alone_need_no_waits():
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8).to("vgpu:0"), nn.Linear(8, 2).to("vgpu:1")
    with vgpu.record() as timeline:
        for piece in torch.randn(12, 8).to("vgpu:0").split(3):
            second(first(piece).to("vgpu:1")).sum().backward()
    assert timeline.races == []


def test_the_gradient_of_a_copy_goes_back_on_the_stream_of_its_target():
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
    # The engine makes the stream of the copy's result current; on vgpu:0 the default one is.
    assert streams == {("vgpu:1", into.stream_id), ("vgpu:0", 0)}
    assert timeline.races == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_of_a_shape_is_checked_as_one_of_values(waits):
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.shapes_only():
        x = torch.ones(2**20, device="vgpu:0")
        with vgpu.record() as timeline:
            y = x + x
            if waits:
                side.wait_stream(torch.vgpu.current_stream("vgpu:0"))
            with side:
                y.to("vgpu:1")
    assert [race.operation for race in timeline.races] == ([] if waits else ["copy"])


def test_the_backward_copy_of_a_shape_waits_for_its_gradient():
    into = torch.vgpu.Stream("vgpu:1")
    with vgpu.shapes_only():
        x = torch.ones(2**20, device="vgpu:0", requires_grad=True)
        with vgpu.record() as timeline:
            with into:
                moved = x.to("vgpu:1")
            torch.vgpu.current_stream("vgpu:1").wait_stream(into)
            moved.square().sum().backward()
    back = [e for e in timeline.of("vgpu:1") if e.backward]
    copy = next(e for e in back if e.kind == "copy")
    assert copy.start_s >= max(e.end_s for e in back if e.kind == "kernel")


# What the caching allocator would hand out again


def current(gpu):
    return torch.accelerator.current_stream(gpu)


def fetched_ahead(batches, weight, records):
    """Batches come on a stream of their own, each while the one before is multiplied."""
    gpu = weight.device
    side = torch.Stream(gpu)
    with side:
        coming = batches[0].to(gpu, non_blocking=True)
    for following in [*batches[1:], None]:
        current(gpu).wait_stream(side)
        batch = coming
        if records:
            batch.record_stream(current(gpu))
        if following is not None:
            with side:
                coming = following.to(gpu, non_blocking=True)
        batch @ weight


@pytest.mark.parametrize("shapes", [False, True])
def test_a_batch_that_is_freed_while_it_is_multiplied_is_reported(shapes):
    with vgpu.shapes_only() if shapes else nullcontext():
        weight = torch.ones(64, 64, device="vgpu:0")
        batches = [torch.ones(64, 64) for _ in range(4)]
        if not shapes:
            batches = [batch.pin_memory() for batch in batches]
        with vgpu.record() as forgotten:
            fetched_ahead(batches, weight, records=False)
        with vgpu.record() as recorded:
            fetched_ahead(batches, weight, records=True)
    (race,) = forgotten.races
    assert isinstance(race, vgpu.FreedInUse)
    assert (race.operation, race.other_operation, race.other_stream) == ("copy", "mm", 0)
    assert race.stream != 0 and race.device == torch.device("vgpu:0")
    assert "freed while mm on stream 0 may still use it: call tensor.record_stream" in str(race)
    assert recorded.races == []
    assert [e.start_s for e in forgotten.events] == [e.start_s for e in recorded.events]


def made_here_used_there(synchronize):
    """A sum on the default stream of what another made, which then goes."""
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record() as timeline:
        with side:
            made = torch.ones(2**20, device="vgpu:0")
        current("vgpu:0").wait_stream(side)
        total = made.sum()
        synchronize(made, side)
        del made
        with side:
            torch.ones(2**20, device="vgpu:0")
    assert total.item() == 2**20
    return timeline.races


def test_nothing_keeps_memory_from_being_handed_out_again_on_its_stream():
    (race,) = made_here_used_there(lambda made, side: None)
    assert (race.operation, race.other_operation, race.other_stream) == ("fill_", "sum", 0)


@pytest.mark.parametrize(
    "synchronize",
    [
        lambda made, side: made.record_stream(current("vgpu:0")),
        lambda made, side: made[:3].record_stream(current("vgpu:0")),  # a view's memory is the same
        lambda made, side: side.wait_stream(current("vgpu:0")),
        lambda made, side: side.wait_event(current("vgpu:0").record_event()),
        lambda made, side: torch.vgpu.synchronize("vgpu:0"),
    ],
    ids=["record_stream", "of a view", "wait_stream", "wait_event", "synchronize"],
)
def test_what_keeps_it(synchronize):
    assert made_here_used_there(synchronize) == []


def test_another_stream_than_the_one_that_was_recorded_is_reported():
    third = torch.vgpu.Stream("vgpu:0")
    assert len(made_here_used_there(lambda made, side: made.record_stream(third))) == 1


def test_a_wait_before_the_last_use_keeps_nothing():
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record() as timeline:
        with side:
            made = torch.ones(8, device="vgpu:0")
        current("vgpu:0").wait_stream(side)
        side.wait_stream(current("vgpu:0"))
        made.sum()
        del made
        with side:
            torch.ones(8, device="vgpu:0")  # may get the same memory
    assert [type(race) for race in timeline.races] == [vgpu.FreedInUse]


def test_memory_that_its_stream_never_hands_out_again_is_not_reported():
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record() as timeline:
        with side:
            made = torch.ones(8, device="vgpu:0")
        current("vgpu:0").wait_stream(side)
        made.sum()
        del made
        torch.ones(8, device="vgpu:0")
    assert timeline.races == []


def test_memory_changed_by_another_stream_is_in_use_there():
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record() as timeline:
        made = torch.ones(8, device="vgpu:0")
        side.wait_stream(current("vgpu:0"))
        with side:
            made.mul_(2)
        del made
        torch.ones(8, device="vgpu:0")
    (race,) = timeline.races
    assert (race.operation, race.other_operation) == ("empty", "mul_")


def test_what_is_kept_or_was_there_before_is_not_reported():
    side = torch.vgpu.Stream("vgpu:0")
    before = torch.ones(8, device="vgpu:0")
    with vgpu.record() as timeline:
        kept = torch.ones(8, device="vgpu:0")
        side.wait_stream(current("vgpu:0"))
        with side:
            kept + before
            before.add_(1)
        del before
    del kept
    assert timeline.races == []


def test_new_memory_on_a_stream_that_does_not_wait_for_its_own_is_reported():
    side = torch.vgpu.Stream("vgpu:0")
    x = torch.ones(8, device="vgpu:0")
    for waits in (False, True):
        with vgpu.record() as timeline:
            x + x  # its memory is what `room` may be given, and may still be written
            room = torch.empty_like(x)
            if waits:
                side.wait_stream(current("vgpu:0"))
            with side:
                room.copy_(x)
            current("vgpu:0").wait_stream(side)
        found = [(race.operation, race.other_operation) for race in timeline.races]
        assert found == ([] if waits else [("copy", "empty_like")])


def test_a_side_stream_with_its_own_waits_needs_no_more_in_training():
    # What a graph keeps goes during backward, whose streams have waited when it is over.
    side = torch.vgpu.Stream("vgpu:0")
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to("vgpu:0")
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with vgpu.record() as timeline:
        for _ in range(3):
            x = layers[0](torch.ones(4, 8, device="vgpu:0")).tanh()
            side.wait_stream(current("vgpu:0"))
            with side:
                x = layers[1](x).tanh()
            current("vgpu:0").wait_stream(side)
            loss = layers[2](x).tanh().square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert timeline.races == []


def test_data_parallel_copies_a_batch_beside_and_records_its_streams():
    model = nn.DataParallel(nn.Linear(8, 8).to("vgpu:0"), [0, 1])
    batch = torch.randn(4, 8).pin_memory()
    with vgpu.record() as timeline:
        for _ in range(2):
            model(batch).sum().backward()
    assert timeline.races == []
    copies = [e for e in timeline.events if e.kind == "copy" and e.source.type == "cpu"]
    assert len(copies) == 4 and all(copy.stream != 0 for copy in copies)
    assert len({(copy.device, copy.stream) for copy in copies}) == 2  # one stream for each GPU
    assert [e for e in timeline.events if e.kind == "wait"] == []  # the host went on
    torch.testing.assert_close(model(batch).cpu(), model.module.cpu()(batch))


def test_a_loop_that_asks_ends_and_then_the_host_knows():
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


def test_sparse_tensors_can_be_recorded():
    with vgpu.record() as timeline:
        sparse = torch.eye(3).to_sparse().to("vgpu:0")
        torch.sparse.mm(sparse, torch.ones(3, 3, device="vgpu:0"))
        total = sparse + sparse
    assert total._nnz() == 3
    assert any(event.name == "add" for event in timeline.events)
