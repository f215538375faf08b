"""Plans with stages: how a model is divided, what's simulated, what's kept, and what's rejected."""

import dataclasses
import json
from itertools import pairwise

import pytest
import torch
from levels import sample
from perfettos_import import assert_is_drawn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import vgpu
from vgpu.plan import Layout, Plan, parallel_model, pipelines, predict, search
from vgpu.plan import __main__ as command
from vgpu.plan.layout import split_layers
from vgpu.plan.parallel_model import ParallelModel, pipeline_stage
from vgpu.plan.pipelines import action_contexts, record_rank, shortened
from vgpu.plan.plan import on_cluster
from vgpu.plan.schedules import Action, peaks_in_flight
from vgpu.plan.transformer import LLAMA, TransformerSizes

SIZES = TransformerSizes(4, 256, 8, 4, 512, 1024, sequence=128)


def plan(layout, batch, **options):
    options = {"sequence": 128, "gpus_per_host": 4, "reshard_after_forward": False} | options
    return Plan(SIZES, layout, batch, **options)


TWO = plan(Layout(dp_shard=2, pp=2), 2, gpus_per_host=2)  # one host per stage

# A rank's launches run ahead of its GPU; here, they start over with each action, which is recorded
# separately.
NO_LAUNCHES = {"python_launch_s": 0.0, "engine_launch_s": 0.0}


# What is simulated


def test_two_stages_compute_as_many_flops_as_one():
    one, two = (predict(plan(Layout(pp=n), 4, gpus_per_host=1)) for n in (1, 2))
    assert one.timeline.flop == two.timeline.flop


def test_parameters_are_gathered_once_and_gradients_reduced_once():
    def sent(**options):
        step = predict(plan(Layout(dp_shard=2, pp=2), 3, micro_batches=3, **options))
        events = step.timeline.of("vgpu:1")
        return [sum(e.name == name for e in events) for name in ("all_gather", "reduce_scatter")]

    gathers, sums = sent()
    assert gathers == sums == 3  # two blocks, and the layers outside them
    again, same = sent(reshard_after_forward=True)
    assert again > gathers and same == sums


def test_pytorchs_own_pipeline_takes_the_same_time_and_bytes():
    """Two ranks of torch.distributed.pipelining, recorded and simulated together."""
    layout = Layout(pp=2)
    whole = plan(layout, 6, micro_batches=3, gpus_per_host=1)
    timelines, peaks = [], []
    for rank in range(2):
        with on_cluster(whole, rank) as made:
            timeline, peak = _torch_s_own(whole, rank, made.device)
            timelines.append(timeline)
            peaks.append(peak)
    together = vgpu.joined(timelines)
    step = predict(whole, **NO_LAUNCHES)
    assert step.seconds == pytest.approx(together.makespan_s, rel=0.005)
    assert step.allocated_bytes == pytest.approx(peaks[step.stage], rel=0.03)


def _loss(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _torch_s_own(whole, rank, gpu):
    mesh, part = whole.layout.mesh("vgpu"), split_layers(SIZES.layers, 2)[rank]
    divided = ParallelModel(pipeline_stage(SIZES, part), whole, mesh)
    divided.configure(whole)
    hidden = torch.empty(2, 128, SIZES.width, dtype=torch.bfloat16, device=gpu).requires_grad_()
    tokens = torch.randint(SIZES.vocabulary, (6, 128), device=gpu)
    logits = torch.empty(2, 128, SIZES.vocabulary, dtype=torch.bfloat16, device=gpu)
    stage = PipelineStage(
        divided.module,
        rank,
        2,
        gpu,
        input_args=(tokens[:2] if part.first else hidden,),
        output_args=(logits if part.last else hidden,),
        group=mesh["pp"].get_group(),
    )
    running = Schedule1F1B(stage, 3, loss_fn=_loss, scale_grads=False)
    optimizer = parallel_model.adam(divided.module)

    def step():
        tokens = torch.randint(SIZES.vocabulary, (6, 128), device=gpu)
        given, right = ((tokens,), {}) if part.first else ((), {"target": tokens})
        running.step(*given, **right, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.get_device_module("vgpu").reset_peak_memory_stats()
    with vgpu.record(**NO_LAUNCHES) as timeline:
        step()
    return timeline, torch.get_device_module("vgpu").max_memory_allocated()


# What is kept


def test_micro_batches_in_flight_and_their_bytes_are_counted():
    whole = plan(Layout(pp=2), 3, micro_batches=3, gpus_per_host=2)
    found = [record_rank(whole, whole.schedule, device) for device in (0, 1)]
    assert [rank.in_flight for rank in found] == peaks_in_flight(whole.schedule) == [2, 1]
    for rank in found:
        bytes_of = rank.bytes_by_cause
        assert bytes_of["gathered parameters"] and bytes_of["gradients"] and not bytes_of["other"]
    more, less = (rank.bytes_by_cause["activations"] for rank in found)
    assert more > 1.2 * less  # twice as many micro-batches, though the last stage has logits, too


@pytest.mark.parametrize("chunks", sample([2, 1], 1))
def test_a_few_micro_batches_predict_the_time_and_bytes_of_many(chunks, monkeypatch):
    whole = plan(Layout(pp=2), 8, chunks=chunks, micro_batches=8, gpus_per_host=2)
    short = shortened(whole)
    assert short.micro_batches < 8
    few = predict(whole)
    monkeypatch.setattr(pipelines, "shortened", lambda plan: plan.schedule)
    many = predict(whole)
    assert few.seconds == pytest.approx(many.seconds, rel=1e-6)
    assert few.allocated_bytes == many.allocated_bytes and few.in_flight == many.in_flight
    assert few.reserved_bytes == many.reserved_bytes


def test_a_schedule_without_redundant_micro_batches_is_not_shortened():
    whole = plan(Layout(pp=4), 4)
    assert shortened(whole) == whole.schedule
    seen = action_contexts(whole.schedule, 0)
    assert [action for action, context in seen.items() if context.last] == [Action("B", 3, 0)]


def test_interleaving_shortens_the_bubble_and_the_step():
    one, two = (plan(Layout(pp=2), 8, chunks=n, gpus_per_host=2) for n in (1, 2))
    plain, interleaved = predict(one), predict(two)
    assert interleaved.idle_s < plain.idle_s


def test_gradients_of_chunks_share_a_link_and_the_update_waits_for_all():
    """One chunk's gradients are still being sent when the next one's are computed."""
    wide = dataclasses.replace(SIZES, layers=5, width=1024, feed_forward=4096)
    options = {"sequence": 128, "chunks": 2, "gpus_per_host": 2, "network": "Ethernet 100"}
    step = predict(Plan(wide, Layout(2, 2, pp=2), 4, **options))
    assert sum(step.time_by_cause.values()) == pytest.approx(step.seconds)
    assert min(step.time_by_cause.values()) > -1e-12
    for device in step.timeline.devices:
        events = step.timeline.of(device)
        sent = [event for event in events if event.kind == "collective"]
        for link in {event.link for event in sent}:
            turns = [event for event in sent if event.link == link]
            assert all(one.end_s <= then.start_s + 1e-12 for one, then in pairwise(turns))
        update = [event for event in events if event.module.startswith("update")]
        assert max(event.end_s for event in sent) <= update[0].start_s
    # Without such contention, the checks above would test nothing.
    assert any(event.waited_s > 1e-6 for event in step.timeline.events)


# What is shown


def test_a_long_prediction_shows_its_progress(capsys, monkeypatch):
    one = plan(Layout(), 1, gpus_per_host=1)
    monkeypatch.setattr(parallel_model, "SHOW_AFTER_S", 1e9)
    predict(TWO), predict(one)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(parallel_model, "SHOW_AFTER_S", 1e-9)
    predict(TWO)
    assert "recording stages" in capsys.readouterr().err
    predict(one)
    assert "predicting" in capsys.readouterr().err


def test_the_trace_has_a_row_for_each_stage(tmp_path, capsys):
    trace = tmp_path / "step.json"
    sizes = (
        "--layers 4 --width 256 --heads 8 --key-value-heads 4 --feed-forward 512 --vocabulary 1024"
    )
    layout = "--pp 2 --tp 2 --chunks 2 --batch 4 --sequence 128 --gpus-per-host 4"
    command.main([*sizes.split(), *layout.split(), "--trace", str(trace)])
    shown = capsys.readouterr().out
    assert "pp 2 × tp 2 on 4 H100" in shown
    assert "interleaved 1F1B, 2 chunks: 2 micro-batches of size 2" in shown
    assert "layers per stage: 1, 2, 1, 0" in shown
    assert "waiting for other stages" in shown and "micro-batches in flight" in shown
    rows = json.loads(trace.read_text())["traceEvents"]
    lanes = {row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert lanes == {f"rank {rank}{gpu}" for rank in (0, 2) for gpu in ("", ", H100 80GB HBM3")}
    assert "3B1" in {row["name"] for row in rows if row.get("cat") == "user_annotation"}
    kernels = [row for row in rows if row.get("cat") == "kernel"]
    sent = [row for row in kernels if row["args"]["module"].startswith("3B1")]
    (action,) = (row for row in rows if row["name"] == "3B1")
    # A last reduction outlasts its action, but the action must not overlap the next one.
    assert max(row["ts"] + row["dur"] for row in sent) > action["ts"] + action["dur"] + 1
    assert_is_drawn(rows)


# Invalid input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layout": Layout(pp=8)},
            "8 pipeline stages .* too many for a model with 4 layers: use at most 4",
        ),
        ({"layout": Layout(pp=4), "chunks": 2}, "8 pipeline stages .* too many"),
        ({"layout": Layout(pp=2), "batch": 3}, "a batch of 3 can't .* 2 micro-batches"),
        (
            {"layout": Layout(pp=4), "chunks": 1, "batch": 6, "micro_batches": 4},
            "a batch of 6 can't be divided evenly into 4 micro-batches",
        ),
        (
            {"layout": Layout(pp=2), "chunks": 2, "micro_batches": 3, "batch": 3},
            "3 isn't a multiple",
        ),
        (
            {"layout": Layout(pp=2), "micro_batches": 0},
            "micro_batches must be an integer of at least 1",
        ),
        (
            {"layout": Layout(), "chunks": 2},
            "are for pipelines: set the layout's pp to at least 2",
        ),
        ({"layout": Layout(dp_shard=4), "micro_batches": 2}, "are for pipelines"),
    ],
)
def test_a_plan_rejects_an_impossible_pipeline(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"sizes": SIZES, "sequence": 128, "batch": 4, "gpus_per_host": 4, **options})


def test_a_search_does_not_try_pipelines():
    with pytest.raises(ValueError, match="this layout has pp = 2"):
        search(TWO)


def test_the_405b_model_is_divided_as_the_command_says():
    whole = Plan(LLAMA["405B"], Layout(1, 8, 8, 8), 32, recompute="full")
    assert whole.schedule.micro_batches == 8 and whole.micro_batch == 4
    assert command._pipeline(whole).endswith("layers per stage: 15, 6 × 16, 15")
