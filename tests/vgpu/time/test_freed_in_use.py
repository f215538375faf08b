"""Memory freed while a stream may still use it, which an allocator might reuse."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

import vgpu

pytestmark = pytest.mark.virtual_gpus(2)


def current(gpu):
    return torch.accelerator.current_stream(gpu)


def recorded_below_dispatch(tensor, stream):
    """Call ``record_stream`` as FSDP1 does."""
    with no_dispatch():
        tensor.record_stream(stream)


def fetched_ahead(batches, weight, records):
    """Copy batches on a separate stream, each while the previous one is multiplied."""
    gpu = weight.device
    side = torch.Stream(gpu)
    with side:
        coming = batches[0].to(gpu, non_blocking=True)
    for following in [*batches[1:], None]:
        current(gpu).wait_stream(side)
        batch = coming
        if records:
            recorded_below_dispatch(batch, current(gpu))
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
    """On the default stream, sum a tensor that another stream created, and then free it."""
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


def test_memory_freed_while_another_stream_reads_it_is_reported():
    (race,) = made_here_used_there(lambda made, side: None)
    assert (race.operation, race.other_operation, race.other_stream) == ("fill_", "sum", 0)


def test_memory_read_last_by_a_backward_pass_is_reported():
    side, weight = torch.vgpu.Stream("vgpu:0"), torch.ones(8, device="vgpu:0").requires_grad_()
    with vgpu.record() as timeline:
        with side:
            made = eight()
        current("vgpu:0").wait_stream(side)
        (made * weight).sum().backward()  # backward multiplies by it again
        del made
        with side:
            eight()
    (race,) = timeline.races
    assert (race.operation, race.other_operation, race.other_stream) == ("fill_", "mul", 0)


@pytest.mark.parametrize(
    "synchronize",
    [
        lambda made, side: made.record_stream(current("vgpu:0")),
        lambda made, side: made[:3].record_stream(current("vgpu:0")),  # a view shares its memory
        lambda made, side: side.wait_stream(current("vgpu:0")),
        lambda made, side: side.wait_event(current("vgpu:0").record_event()),
        lambda made, side: torch.vgpu.synchronize("vgpu:0"),
    ],
    ids=["record_stream", "record_stream of a view", "wait_stream", "wait_event", "synchronize"],
)
def test_record_stream_or_a_wait_keeps_memory_from_reuse(synchronize):
    assert made_here_used_there(synchronize) == []


def test_a_stream_other_than_the_recorded_one_is_reported():
    third = torch.vgpu.Stream("vgpu:0")
    assert len(made_here_used_there(lambda made, side: made.record_stream(third))) == 1


def eight():
    return torch.ones(8, device="vgpu:0")


def wait_before_the_last_use(main, side, before):
    with side:
        made = eight()
    main.wait_stream(side)
    side.wait_stream(main)
    made.sum()
    del made
    with side:
        eight()  # may get the same memory


def reuse_no_memory(main, side, before):
    with side:
        made = eight()
    main.wait_stream(side)
    made.sum()
    del made
    eight()


def change_on_another_stream(main, side, before):
    made = eight()
    side.wait_stream(main)
    with side:
        made.mul_(2)
    del made
    eight()


def outlive_or_predate_the_recording(main, side, before):
    kept = eight()
    side.wait_stream(main)
    with side:
        kept + before[0]
        before.pop().add_(1)
    return kept


def use_new_memory_elsewhere(main, side, before, waits=False):
    eight().neg()  # `room` may reuse this memory while it's still being written
    room = torch.empty_like(before[0])
    if waits:
        side.wait_stream(main)
    with side:
        room.copy_(before[0])
    main.wait_stream(side)


CASES = [
    (wait_before_the_last_use, [("fill_", "sum")]),
    (reuse_no_memory, []),
    (change_on_another_stream, [("empty", "mul_")]),
    (outlive_or_predate_the_recording, []),
    (use_new_memory_elsewhere, [("copy", "empty_like")]),
    (functools.partial(use_new_memory_elsewhere, waits=True), []),
]


@pytest.mark.parametrize(("program", "wanted"), CASES)
def test_memory_in_use_is_distinguished_from_reusable_memory(program, wanted):
    side, before = torch.vgpu.Stream("vgpu:0"), [eight()]
    with vgpu.record() as timeline:
        kept = program(current("vgpu:0"), side, before)
    del kept
    assert [(race.operation, race.other_operation) for race in timeline.races] == wanted


def test_a_side_stream_with_its_own_waits_suffices_in_training():
    # Tensors kept by a graph are freed during backward, by the end of which its streams have waited.
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


def test_data_parallel_copies_a_batch_on_side_streams_and_records_them():
    model = nn.DataParallel(nn.Linear(8, 8).to("vgpu:0"), [0, 1])
    batch = torch.randn(4, 8).pin_memory()
    with vgpu.record() as timeline:
        for _ in range(2):
            model(batch).sum().backward()
    assert timeline.races == []
    copies = [e for e in timeline.events if e.kind == "copy" and e.source.type == "cpu"]
    assert len(copies) == 4 and all(copy.stream != 0 for copy in copies)
    assert len({(copy.device, copy.stream) for copy in copies}) == 2  # one stream for each GPU
    assert [e for e in timeline.events if e.kind == "wait"] == []  # the host didn't wait
    torch.testing.assert_close(model(batch).cpu(), model.module.cpu()(batch))
