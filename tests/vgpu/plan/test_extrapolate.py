"""A step extrapolated from a few layers matches the full model's step."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from levels import sample
from torch.nn.parallel import DistributedDataParallel

import vgpu
from vgpu.plan import Layout, Plan, extrapolate, predict
from vgpu.plan.experts import ExpertSizes
from vgpu.plan.layout import RECOMPUTE
from vgpu.plan.plan import on_cluster
from vgpu.plan.recorded_step import Rank
from vgpu.plan.transformer import LatentSizes, TransformerSizes

SIZES = TransformerSizes(8, 1024, 8, 8, 2752, 2048, sequence=1024)


@pytest.mark.parametrize(
    "layout", sample([Layout(dp_shard=4, tp=4), Layout(dp_shard=16)], 1), ids=str
)
def test_extrapolated_time_and_bytes_match_all_layers(layout):
    plan = Plan(SIZES, layout, 4, 1024, "full")
    few = extrapolate(
        dataclasses.replace(plan, gpu="A100"), gpu=plan.gpu
    )  # the plan's own GPU, passed as a cost
    whole = predict(plan)
    assert few.plan == plan
    assert few.seconds() == pytest.approx(whole.seconds, rel=0.01)
    assert few.tokens_per_s() == pytest.approx(whole.tokens_per_s, rel=0.01)
    percent = 0.01 * whole.allocated_bytes
    parts = [step.bytes_by_cause for step in few.steps]
    assert few.bytes_by_cause == pytest.approx(whole.bytes_by_cause, abs=percent), parts
    assert sum(few.bytes_by_cause.values()) == pytest.approx(whole.allocated_bytes, rel=0.01)
    for cause in ("parameters", "optimizer state"):
        assert few.bytes_by_cause[cause] == pytest.approx(whole.bytes_by_cause[cause], rel=1e-3)
    assert sum(few.time_by_cause.values()) == pytest.approx(few.seconds())


def test_extrapolated_bytes_match_if_few_layers_peak_at_another_moment():
    sizes = dataclasses.replace(SIZES, layers=16, vocabulary=32_768, sequence=512)
    plan = Plan(sizes, Layout(dp_shard=4))
    few, whole = extrapolate(plan), predict(plan)
    # With four layers, memory peaks when all gradients exist; with sixteen, when blocks keep most.
    assert few.steps[0].bytes_by_cause["activations"] < 2**16
    assert whole.bytes_by_cause["activations"] > whole.allocated_bytes / 4
    assert few.bytes_by_cause == pytest.approx(whole.bytes_by_cause, rel=1e-3)


def test_extrapolated_bytes_match_if_they_peak_in_the_backward_pass():
    """With a few layers, memory peaks at its end, with the embedding's and output's gradients."""
    sizes = TransformerSizes(24, 1024, 8, 8, 2752, 40_000, sequence=256)
    plan = Plan(sizes, Layout(dp_shard=64))
    few, whole = extrapolate(plan), predict(plan)
    assert sum(few.bytes_by_cause.values()) == pytest.approx(whole.allocated_bytes, rel=1e-3)
    assert few.steps[1].bytes_by_cause == few.steps[1].peaks[-1]
    assert whole.bytes_by_cause != whole.peaks[-1]


def test_compiled_layers_take_the_same_time_without_gathers_between_them():
    sizes = dataclasses.replace(SIZES, layers=12)
    plan = Plan(
        sizes, Layout(dp_shard=4), reshard_after_forward=False, accumulate=2, sync_once=True
    )
    assert extrapolate(plan, fuses=True).seconds() == pytest.approx(
        predict(plan, fuses=True).seconds, rel=1e-3
    )


DENSE = TransformerSizes(8, 256, 4, 2, 1024, 32_000)
GPT = dataclasses.replace(DENSE, form="gpt")
SHARED = dataclasses.replace(DENSE, experts=ExpertSizes(8, 2, 512, shared_width=256))
LATENT = dataclasses.replace(
    DENSE, key_value_heads=4, latent=LatentSizes(64, 32, 16), experts=ExpertSizes(8, 2, 512)
)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (DENSE, {}),
        (DENSE, {"layout": Layout(tp=2)}),
        (DENSE, {"layout": Layout(tp=2), "float8": True}),
        (GPT, {"float8": True}),
        (SHARED, {}),
        (LATENT, {}),
    ],
    ids=["dense", "tp 2", "float8", "GPT", "experts", "latent"],
)
def test_a_block_keeps_hardly_more_than_the_estimate(sizes, options, recompute, fuses):
    plan = Plan(sizes, batch=2, recompute=recompute, **({"layout": Layout()} | options))
    few, more = (step.peaks[2]["activations"] for step in extrapolate(plan, fuses=fuses).steps)
    # FSDP2 casts the tables of rotary positions for each block, and its input isn't much larger.
    width = sizes.latent.rotary_width if sizes.latent else sizes.head_width
    kept = more - few - 2 * plan.tokens_per_sequence * width
    least = plan.least_kept_bytes(compiled=fuses)
    most = {"none": 1.12, "selective": 1.1, "full": 1.01}[recompute]
    if sizes.experts and recompute == "none":
        most = 1.4  # the estimate leaves out the routing
    assert least <= kept <= most * least


@pytest.mark.parametrize("layout", sample([Layout(2, 4, 2), Layout(dp_replicate=16)], 1), ids=str)
def test_a_rank_can_be_recorded_without_an_earlier_step(layout):
    plan = Plan(dataclasses.replace(SIZES, layers=4), layout, 2, 1024, "selective")
    with on_cluster(plan):
        first, second = (Rank(plan, takes_a_step).recorded(plan) for takes_a_step in (False, True))
    parts = [
        [
            (one.name, one.module, one.start_s, one.end_s, one.size_bytes)
            for one in step.timeline.events
        ]
        for step in (first, second)
    ]
    assert parts[0] == parts[1] and first.seconds == second.seconds
    assert first.bytes_by_cause == second.bytes_by_cause
    assert first.allocated_bytes > 0


def test_a_new_rank_never_allocates_more_than_its_own_part():
    """Otherwise, the allocator would reserve memory that the rank doesn't need."""
    plan = Plan(SIZES, Layout(dp_shard=8, tp=2))
    with on_cluster(plan):
        rank = Rank(plan, takes_a_step=False)
        gpu = torch.get_device_module("vgpu")
        own_bytes = sum(parameter.to_local().nbytes for parameter in rank.model.parameters())
        allocated_bytes = gpu.memory_allocated()
        assert gpu.max_memory_allocated() == allocated_bytes
    assert 3 * own_bytes <= allocated_bytes < 3.05 * own_bytes  # with the optimizer's state


def test_ddp_used_earlier_in_the_process_does_not_change_bytes(tmp_path):
    """DDP's group is gone, and the plan's group gets the same name."""
    store = (tmp_path / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    with vgpu.enable(1):
        model = DistributedDataParallel(torch.nn.Linear(4, 4).to("vgpu:0"))
        model(torch.ones(2, 4, device="vgpu:0")).sum().backward()
    dist.destroy_process_group()
    plan = Plan(dataclasses.replace(SIZES, layers=3), Layout(dp_shard=16), 4, 1024, "full")
    first, second = predict(plan), predict(plan)
    assert first.bytes_by_cause == second.bytes_by_cause


def test_other_costs_need_no_new_recording():
    plan = Plan(SIZES, Layout(dp_shard=16), 1, 1024)
    few = extrapolate(plan)
    again = predict(plan, arithmetic_share=0.3)
    assert few.seconds(arithmetic_share=0.3) == pytest.approx(again.seconds, rel=0.01)
    assert few.seconds() < few.seconds(arithmetic_share=0.3)


@pytest.mark.parametrize(
    ("layers", "layout", "message"),
    [
        (4, Layout(dp_shard=16), "a model with 4 layers is small enough"),
        (8, Layout(dp_shard=8, pp=2), "a plan with pp = 2 can't be extrapolated"),
    ],
)
def test_a_small_model_and_a_pipeline_are_not_extrapolated(layers, layout, message):
    plan = Plan(dataclasses.replace(SIZES, layers=layers), layout, 4, 1024)
    with pytest.raises(ValueError, match=message):
        extrapolate(plan)
