"""A timeline as torch.profiler's JSON: launches, what they launch, collectives, ranges, ranks."""

import itertools
import json

import pytest
import torch
import torch.distributed as dist
from perfettos_import import assert_is_drawn
from torch.profiler import record_function

import vgpu

pytestmark = pytest.mark.virtual_gpus(2)


def rows_of(timeline, path, rank=None):
    timeline.to_chrome_trace(path, rank)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def spans(rows, *categories):
    return [row for row in rows if row["ph"] == "X" and row["cat"] in categories]


def step_of_rank(rank, extra_s=0.0):
    with vgpu.cluster(hosts=1, gpus_per_host=2, gpu="H100", rank=rank), vgpu.shapes_only():
        weight = torch.ones(1024, 1024, device="vgpu", dtype=torch.bfloat16)
        with vgpu.record() as timeline:
            vgpu.spend(0.001 + extra_s, "load a batch")
            dist.all_reduce(weight @ weight)
    return timeline


@pytest.fixture
def joined():
    return vgpu.joined([step_of_rank(0), step_of_rank(1, 0.002)])


def test_each_kernel_is_linked_to_its_launch(tmp_path):
    x = torch.ones(2**20, device="vgpu:0")
    with vgpu.record() as timeline:
        x.neg().to("vgpu:1").sum().item()
    rows = rows_of(timeline, tmp_path / "trace.json")
    calls = spans(rows, "cuda_runtime")
    launches = {call["args"]["correlation"]: call for call in calls if "Sync" not in call["name"]}
    on_gpus = spans(rows, "kernel", "gpu_memcpy")
    assert len(on_gpus) == len([event for event in timeline.events if event.kind != "wait"])
    for row in on_gpus:
        launch = launches[row["args"]["correlation"]]
        assert launch["ts"] + launch["dur"] <= row["ts"] + 1e-6
    for start in (row for row in rows if row["ph"] == "s"):
        ends = [row for row in rows if row["ph"] == "f" and row["id"] == start["id"]]
        assert ends and {(end["pid"], end["tid"]) for end in ends} <= {(0, 7), (1, 7)}
    (waits,) = (call for call in calls if "Sync" in call["name"])
    assert waits["name"] == "cudaStreamSynchronize"
    assert waits["args"] == {"for": "aten::_local_scalar_dense"}
    assert {row["name"] for row in spans(rows, "gpu_memcpy")} == {"Memcpy PtoP (Device -> Device)"}


def test_every_row_is_in_a_named_thread(joined, tmp_path):
    rows = rows_of(joined, tmp_path / "trace.json")
    named = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    assert {(row["pid"], row["tid"]) for row in rows if row["ph"] == "X"} == named


def test_a_collective_has_its_element_type_and_group(joined, tmp_path):
    rows = rows_of(joined, tmp_path / "trace.json")
    first, second = (row for row in rows if row["name"] == "ncclDevKernel_AllReduce")
    for row in (first, second):
        assert row["args"]["Collective name"] == "allreduce"
        assert row["args"]["In msg nelems"] == row["args"]["Out msg nelems"] == 2**20
        assert row["args"]["dtype"] == "BFloat16"
        assert row["args"]["Group size"] == 2
        assert row["args"]["Process Group Ranks"] == "[0, 1]"
    assert first["pid"] != second["pid"]


def test_an_all_gather_receives_more_elements_than_it_sends(tmp_path):
    with vgpu.cluster(hosts=1, gpus_per_host=2, gpu="H100"), vgpu.shapes_only():
        part, whole = torch.empty(100, device="vgpu"), torch.empty(200, device="vgpu")
        with vgpu.record() as timeline:
            dist.all_gather_single(whole, part)
    rows = rows_of(timeline, tmp_path / "trace.json")
    (row,) = (row for row in rows if row["name"] == "ncclDevKernel_AllGather")
    assert (row["args"]["In msg nelems"], row["args"]["Out msg nelems"]) == (100, 200)


def test_a_collective_lasts_from_its_own_ranks_arrival_to_the_common_end(joined, tmp_path):
    rows = rows_of(joined, tmp_path / "trace.json")
    early, late = (row for row in rows if row["name"] == "ncclDevKernel_AllReduce")
    assert early["ts"] + early["dur"] == pytest.approx(late["ts"] + late["dur"])
    assert early["dur"] - late["dur"] == pytest.approx(2000)


def test_one_rank_of_a_joined_timeline_has_its_own_file(joined, tmp_path):
    path = tmp_path / "rank1.json"
    rows = rows_of(joined, path, rank=1)
    info = json.loads(path.read_text(encoding="utf-8"))["distributedInfo"]
    assert (info["rank"], info["world_size"]) == (1, 2)
    assert {row["pid"] for row in rows} == {1, 1001}
    assert [row["dur"] for row in rows if row["name"] == "load a batch"] == [pytest.approx(3000)]
    both = rows_of(joined, tmp_path / "both.json")
    assert len(both) == len(rows) + len(rows_of(joined, tmp_path / "rank0.json", rank=0))


def test_a_rank_that_is_not_in_the_timeline_is_rejected(joined, tmp_path):
    with pytest.raises(ValueError, match=r"the ranks in this timeline, \[0, 1\], got 2"):
        joined.to_chrome_trace(tmp_path / "trace.json", rank=2)


def test_a_record_function_block_is_a_host_range(tmp_path):
    x = torch.ones(8, device="vgpu:0")
    with record_function("before"), vgpu.record() as timeline:
        with record_function("outer"), record_function("inner"):
            x.neg()
        vgpu.spend(0.5)
    assert [(each.name, each.kind) for each in timeline.host_ranges] == [
        ("inner", "range"),
        ("outer", "range"),
        ("host work", "work"),
    ]
    (launched,) = (event.launch_s for event in timeline.events)
    assert timeline.host_ranges[0].end_s == launched
    rows = rows_of(timeline, tmp_path / "trace.json")
    assert {row["name"] for row in spans(rows, "user_annotation")} == {
        "outer",
        "inner",
        "host work",
    }
    assert vgpu.replay(timeline).host_ranges == timeline.host_ranges


def test_a_loader_has_the_category_that_the_profiler_gives_it(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        next(iter(torch.utils.data.DataLoader(range(4))))
    profiler.export_chrome_trace(str(tmp_path / "real.json"))
    real = json.loads((tmp_path / "real.json").read_text(encoding="utf-8"))["traceEvents"]
    categories = {row["name"]: row["cat"] for row in real if "DataLoader" in row["name"]}
    (name,) = (each for each in categories if each.endswith("__next__"))
    with vgpu.record() as timeline:
        vgpu.spend(0.5, name)
    (row,) = spans(rows_of(timeline, tmp_path / "trace.json"), "user_annotation")
    assert categories[row["name"]] == row["cat"]


def test_record_function_is_restored_after_a_recording():
    before = record_function.__enter__, record_function.__exit__
    with vgpu.record():
        assert record_function.__enter__ is not before[0]
    assert (record_function.__enter__, record_function.__exit__) == before


def test_backward_is_launched_by_an_autograd_thread(tmp_path):
    x = torch.ones(8, device="vgpu:1", requires_grad=True)
    with vgpu.record() as timeline:
        x.exp().sum().backward()
    rows = rows_of(timeline, tmp_path / "trace.json")
    threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    of = {row["name"]: threads[row["tid"]] for row in spans(rows, "cpu_op")}
    assert of["aten::exp"] == "thread 0" and of["aten::mul"] == "autograd, GPU 1"


def test_kernels_on_a_stream_do_not_overlap_when_rounded_to_nanoseconds(tmp_path):
    # Two spans on a track must be nested or apart: Perfetto marks others as errors, or drops them.
    x = torch.ones(1000, 1000, device="vgpu:0")
    with vgpu.record() as timeline:
        for _ in range(30):
            x = x.neg()
    rows = spans(rows_of(timeline, tmp_path / "trace.json"), "kernel")
    times_ns = [(round(row["ts"] * 1e3), round(row["dur"] * 1e3)) for row in rows]
    assert len(times_ns) == 30 and all(row["ts"] == round(row["ts"], 3) for row in rows)
    for (start, lasts), (following, _) in itertools.pairwise(times_ns):
        assert start + lasts <= following


def test_perfetto_draws_every_span_and_arrow(joined, tmp_path):
    assert_is_drawn(rows_of(joined, tmp_path / "joined.json"))
    x = torch.ones(2**20, device="vgpu:0", requires_grad=True)
    with vgpu.record() as timeline, record_function("step"):
        with torch.vgpu.stream(torch.vgpu.Stream("vgpu:0")):
            x.exp().to("vgpu:1").sum().backward()
        x.detach().sum().item()
    assert_is_drawn(rows_of(timeline, tmp_path / "trace.json"))
