"""Timeline figures: lanes, colors, and few bars for many kernels."""

import itertools

import matplotlib
import matplotlib.pyplot
import pytest
import torch
from torch import nn

import vgpu
from helpers import plots
from helpers.plots import style
from helpers.plots.timeline import kind_of, lanes_of, spans, stretches, timeline, timelines, traces

matplotlib.use("Agg")


@pytest.fixture
def recorded():
    with vgpu.enable(3, gpu="K80"), vgpu.shapes_only():
        first, second = nn.Linear(64, 64).to("vgpu:0"), nn.Linear(64, 64).to("vgpu:1")
        x = torch.randn(4096, 64)
        with vgpu.record() as found:
            second(first(x.to("vgpu:0")).relu().to("vgpu:1")).sum().backward()
            torch.vgpu.synchronize("vgpu:0")
        return found


def test_every_gpu_has_a_lane_and_every_event_a_kind(recorded):
    lanes = lanes_of(recorded, host=True)
    assert list(lanes) == ["vgpu:0", "vgpu:1", "vgpu:2", "host"]
    assert lanes["vgpu:2"] == []
    # relu() isn't part of any module.
    kinds = {"copy", "forward", "backward", "other kernels"}
    assert {kind_of(e) for e in lanes["vgpu:0"]} == kinds
    assert list(lanes_of(recorded, devices=recorded.devices[1:2])) == ["vgpu:1"]
    assert {kind_of(e) for e in lanes["host"]} == {"wait"}


def test_a_copying_kernel_counts_as_a_copy_only_on_a_side_stream(recorded):
    copying = recorded.of("vgpu:0")[0]._replace(kind="kernel", name="_foreach_copy_", module="0")
    assert [kind_of(copying._replace(stream=stream)) for stream in (0, 1)] == ["forward", "copy"]


def test_stretches_join_neighboring_events_of_the_same_kind(recorded):
    events = lanes_of(recorded)["vgpu:0"]
    bars = stretches(events, gap_s=1.0)
    kinds = [kind for kind, _, _ in bars]
    assert all(kind != following for kind, following in itertools.pairwise(kinds))
    assert bars[0][1] == events[0].start_s and bars[-1][2] == events[-1].end_s
    assert len(stretches(events, gap_s=0.0)) >= len(bars)


def test_stretches_keep_consecutive_collectives_separate(recorded):
    kernel = recorded.of("vgpu:0")[0]
    times = [(0.0, 1.0), (1.0, 2.0), (2.0, 2.01), (2.01, 2.02)]
    gathers = [kernel._replace(kind="collective", start_s=a, end_s=b) for a, b in times]
    long = [(a, b) for _, a, b in stretches(gathers, gap_s=0.1)]
    assert long == [(0.0, 1.0), (1.0, 2.02)]  # hairlines join the bar before them


@pytest.fixture
def axes_drawn(monkeypatch):
    """The axes of each figure that is shown."""
    drawn = []
    monkeypatch.setattr(
        "helpers.plots.style.display", lambda _: drawn.extend(matplotlib.pyplot.gcf().get_axes())
    )
    return drawn


def test_timeline_names_the_gpu_and_scales_the_axis(recorded, axes_drawn):
    timeline(recorded, "Two stages")
    (axes,) = axes_drawn
    words = [text.get_text() for text in axes.texts]
    assert "virtual time, Tesla K80" in words
    assert axes.get_title(loc="left").strip() == "Two stages"
    assert axes.get_xlabel() == "µs" and axes.get_xlim()[1] == 1e6 * recorded.makespan_s


def test_a_second_stream_is_named_after_what_it_does():
    with vgpu.enable(2, gpu="K80") as lab, vgpu.shapes_only():
        here, there = lab.devices
        x = torch.randn(64, 64, device=here)
        out, into, mixed = torch.Stream(here), torch.Stream(there), torch.Stream(here)
        with vgpu.record() as found:
            out.wait_stream(torch.accelerator.current_stream(here))
            with out, into:
                moved = x.to(there, non_blocking=True)
            torch.accelerator.current_stream(there).wait_stream(into)
            moved + 1
            mixed.wait_stream(torch.accelerator.current_stream(here))
            with mixed:
                x.to("cpu")
                x + 1
    names = list(lanes_of(found))
    assert names[0] == "vgpu:0, copies out" and names[1].startswith("vgpu:0, stream ")
    assert names[2:] == ["vgpu:1", "vgpu:1, copies in"]


def test_streams_of_collectives_are_named_after_their_links():
    with vgpu.cluster(hosts=2, gpus_per_host=2), vgpu.shapes_only():
        mesh = torch.distributed.init_device_mesh("vgpu", (2, 2), mesh_dim_names=("far", "near"))
        x = torch.empty(4096, 4096, device="vgpu")
        with vgpu.record() as found:
            x + 1
            for name in ("far", "near"):
                torch.distributed.all_reduce(x, group=mesh.get_group(name))
            torch.accelerator.synchronize()
    names = list(lanes_of(found, devices=found.devices[:1]))
    assert names == ["vgpu:0", "vgpu:0, over InfiniBand", "vgpu:0, over NVLink"]


def test_timelines_share_one_scale(recorded, monkeypatch):
    drawn = []

    def display(picture):
        drawn.append((picture.alt, matplotlib.pyplot.gcf().get_axes()))

    monkeypatch.setattr("helpers.plots.style.display", display)
    with vgpu.enable(1, gpu="K80"), vgpu.record() as short:
        torch.ones(8, device="vgpu:0") + 1
    timelines({"Two stages": recorded, "One addition": short}, host=True)
    ((alt, panels),) = drawn
    assert [panel.get_xlim() for panel in panels] == [(0, 1e6 * recorded.makespan_s)] * 2
    left = [panel.get_position().x0 for panel in panels]
    assert left[0] == left[1]
    assert "Two stages: " in alt and "One addition: " in alt and "host wait" in alt


def test_as_in_trace_starts_a_collective_when_its_own_rank_arrives(monkeypatch):
    def steps(rank, rows):
        with vgpu.cluster(hosts=1, gpus_per_host=2, rank=rank), vgpu.shapes_only():
            x = torch.empty(rows, 4096, device="vgpu")
            with vgpu.record() as found:
                x @ x.T
                torch.distributed.all_reduce(x[:64])
                torch.accelerator.synchronize()
        return found

    alts = []
    monkeypatch.setattr("helpers.plots.style.display", lambda picture: alts.append(picture.alt))
    joined = vgpu.joined([steps(0, 4096), steps(1, 8192)])
    timeline(joined, as_in_trace=True)
    traces({"Two ranks": joined})
    own, *_ = alts[0].split("vgpu:1")
    assert "collective, waiting" in own and alts[0].count("collective, waiting") == 1
    assert "host of rank 0 host at work" in alts[1]


@pytest.mark.virtual_gpus(2)
def test_lanes_of_joined_ranks_are_numbered_by_rank():
    devices = [torch.device("vgpu", index) for index in range(2)]
    joined = vgpu.Timeline("made by hand", devices, ranks=[0, 64])
    assert list(lanes_of(joined)) == ["rank 0", "rank 64"]
    assert list(lanes_of(vgpu.Timeline("made by hand", devices, ranks=[0, 1]))) == [
        "vgpu:0",
        "vgpu:1",
    ]


def test_a_stream_of_hairlines_has_no_lane(axes_drawn):
    """Its lane would look empty; the line below the title says that it's omitted."""
    with vgpu.enable(1, gpu="K80"), vgpu.shapes_only():
        x, tiny = torch.ones(2**26, device="vgpu"), torch.ones(1, device="vgpu")
        with vgpu.record() as found:
            x.neg()
            with torch.vgpu.stream(torch.vgpu.Stream()):
                tiny.neg()
    assert len(lanes_of(found)) == 2
    timeline(found, "One kernel")
    (axes,) = axes_drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vgpu:0"]
    under = "virtual time, Tesla K80; omits a stream that is busy only briefly"
    assert under in [text.get_text() for text in axes.texts]


def test_overlap_labels_the_buffers_the_buckets_and_the_copies(monkeypatch):
    shown = []
    monkeypatch.setattr(style, "display", lambda picture: shown.append(picture.alt))

    def model():
        return nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512))

    with vgpu.enable(2, gpu="V100"):
        ddp = vgpu.ddp_iteration(model, (64, 512), (64, 512), 2)
    plots.overlap(ddp, "DDP")
    assert "buffers, 1 MiB, 1.01 MiB, copies out of the buckets, then the optimizer." in shown[0], (
        shown
    )
    # Autograd launches the copies out of the buckets, but they aren't part of backward.
    events = ddp.of(ddp.devices[0])
    backward = [event for event in events if event.backward and event.kind == "kernel"]
    reduced_s = max(event.end_s for event in events if event.name == "all_reduce")
    during_s = vgpu.covered_s(event for event in backward if event.start_s < reduced_s)
    assert during_s < vgpu.covered_s(backward)
    plots.timeline(ddp, devices=ddp.devices[:1], ddp=True)
    for text in shown:
        assert f"backward {during_s / ddp.makespan_s:.0%}, other kernels" in text, text


def test_traces_draw_who_receives_from_whom_and_a_long_operation_of_the_host(monkeypatch):
    def passed(rank):
        with vgpu.cluster(hosts=1, gpus_per_host=2, rank=rank), vgpu.shapes_only():
            x = torch.empty(4096, 4096, device="vgpu")
            with vgpu.record() as found:
                vgpu.spend(1e-3, "load")
                (torch.distributed.recv if rank else torch.distributed.send)(x, 1 - rank)
                torch.accelerator.synchronize()
        return found

    alts = []
    monkeypatch.setattr("helpers.plots.style.display", lambda picture: alts.append(picture.alt))
    traces({"Trace E": vgpu.joined([passed(0), passed(1)])})
    assert "recv from 0 collective" in alts[0] and "send to 1 collective" in alts[0]
    assert "host in one long operation 83%" in alts[0]


def test_spans_add_up_each_group_of_each_lane(monkeypatch):
    alts = []
    monkeypatch.setattr("helpers.plots.style.display", lambda picture: alts.append(picture.alt))
    event = {"ts": 5.0, "dur": 2000.0}
    spans({"rank 0": {"load": [event, event]}, "rank 1": {"load": [event]}}, "Who loads?")
    assert "rank 0: load 4 ms; rank 1: load 2 ms" in alts[0]


@pytest.fixture
def written(monkeypatch):
    """The texts in the figures drawn, apart from the line below the title."""
    texts = []

    def keep(_):
        every = matplotlib.pyplot.gca().texts
        texts.extend(text for text in every if not text.get_text().startswith("virtual time"))

    monkeypatch.setattr(style, "display", keep)
    return texts


def test_pieces_are_numbered_forward_and_then_backward_from_the_last(written):
    with vgpu.enable(1, gpu="K80"), vgpu.shapes_only():
        layer = nn.Linear(64, 64).to("vgpu:0")
        batch = torch.randn(4096, 64, device="vgpu:0")
        with vgpu.record() as found:
            pieces = [layer(piece.requires_grad_()) for piece in batch.split(1024)]
            torch.cat(pieces).sum().backward()
    timelines({"pieces": found})
    assert written == []
    timelines({"pieces": found}, numbered=["pieces"])
    assert [text.get_text() for text in written] == [*"1234", *"4321"]
    places = [text.get_position()[0] for text in written]
    assert places == sorted(places)


def test_a_note_is_written_in_its_lane_between_its_times(recorded, written):
    timeline(recorded, notes={"idle": (1, 0.0, recorded.makespan_s)})
    (note,) = written
    x, lane = note.get_position()
    assert (note.get_text(), lane) == ("idle", 1)
    assert x == pytest.approx(sum(note.axes.get_xlim()) / 2)
