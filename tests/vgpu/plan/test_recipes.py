"""Training variants: gradient accumulation, the dtype of reductions, and recomputed blocks."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from vgpu.plan import Layout, Plan, extrapolate, predict
from vgpu.plan.parallel_model import recomputed
from vgpu.plan.transformer import TransformerSizes

SMALL = TransformerSizes(4, 256, 4, 2, 512, 1024, 256)


@pytest.mark.parametrize("sync_once", [False, True])
def test_unrecorded_micro_batches_take_as_long_as_the_second(sync_once, monkeypatch):
    plan = Plan(SMALL, Layout(dp_shard=8), 2, accumulate=5, sync_once=sync_once)
    few = predict(plan)
    few_s, few_causes = few.seconds, few.time_by_cause
    monkeypatch.setattr("vgpu.plan.recorded_step._RECORDED", {False: 5, True: 5})
    whole = predict(plan)
    assert few_s == pytest.approx(whole.seconds, rel=0.02)
    assert sum(few_causes.values()) == pytest.approx(few_s)
    assert few_causes == pytest.approx(whole.time_by_cause, rel=0.05, abs=few_s / 1000)
    assert few.allocated_bytes == whole.allocated_bytes
    assert plan.tokens == 5 * dataclasses.replace(plan, accumulate=1).tokens


def test_sync_once_gathers_and_reduces_once_and_holds_whole_gradients():
    plan = Plan(SMALL, Layout(dp_shard=8), accumulate=3, reshard_after_forward=False)
    often, once = predict(plan), predict(dataclasses.replace(plan, sync_once=True))

    def collectives(step):
        return Counter(e.name for e in step.timeline.events if e.kind == "collective")

    units = SMALL.layers + 1  # the blocks and the root
    assert collectives(once) == {"all_gather": units, "reduce_scatter": units}
    assert collectives(often) == {"all_gather": 2 * units, "reduce_scatter": 2 * units}
    whole_bytes = 4 * SMALL.parameters
    assert once.bytes_by_cause["gradients"] == whole_bytes
    assert often.bytes_by_cause["gradients"] < whole_bytes / 7


def test_reducing_gradients_in_bfloat16_halves_their_bytes():
    sent = {
        reduce: sum(
            event.size_bytes
            for event in predict(Plan(SMALL, Layout(dp_shard=8), reduce=reduce)).timeline.events
            if event.name == "reduce_scatter"
        )
        for reduce in ("float32", "bfloat16")
    }
    assert sent["float32"] == 2 * sent["bfloat16"] > 0


def test_recomputing_every_other_block_is_between_all_and_none():
    plan = Plan(SMALL, Layout(dp_shard=8), 8, recompute="full")
    full, half, none = (
        predict(dataclasses.replace(plan, **change))
        for change in ({}, {"recompute_every": 2}, {"recompute": "none"})
    )
    assert full.allocated_bytes < half.allocated_bytes < none.allocated_bytes
    assert full.seconds > half.seconds > none.seconds


def test_compiled_blocks_do_not_save_their_last_matmul():
    plan = Plan(SMALL, Layout(dp_shard=8), 8, recompute="selective")
    eager, compiled = (predict(plan, fuses=fuses) for fuses in (False, True))
    output_bytes = 2 * plan.batch * plan.sequence * SMALL.width
    saved_bytes = eager.allocated_bytes - compiled.allocated_bytes
    # At the peak, the last block's recomputation may be under way.
    assert saved_bytes in ((SMALL.layers - 1) * output_bytes, SMALL.layers * output_bytes)


@pytest.mark.filterwarnings("ignore")  # TorchDynamo's own
def test_the_partitioner_of_torch_compile_saves_every_second_matmul_but_the_last():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

        def forward(self, hidden):
            inside = hidden
            for layer in self.layers:
                inside = layer(F.silu(inside))
            return hidden + inside

    saved = []

    def forward_compiler(graph, inputs):
        matmuls = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        outputs = graph.graph.output_node().args[0]
        saved.append([number for number, node in enumerate(matmuls, 1) if node in outputs])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    block = Residual()
    forward = recomputed(block, block.forward, "selective")
    compiled = torch.compile(lambda hidden: forward(hidden), backend=backend, fullgraph=True)
    compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert saved == [[1, 3]]


def test_a_few_layers_extrapolate_with_every_third_block_recomputed():
    sizes = dataclasses.replace(SMALL, layers=12)
    plan = Plan(sizes, Layout(dp_shard=8), 8, recompute="full", recompute_every=3)
    assert extrapolate(plan).seconds() == pytest.approx(predict(plan).seconds, rel=0.01)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2, tp=2), Layout(dp_shard=2, tp=2, pp=2)], ids=str
)
def test_gpt_models_can_be_planned_with_fsdp_tensor_and_pipeline_parallelism(layout):
    gpt = dataclasses.replace(SMALL, form="gpt")
    step = predict(Plan(gpt, layout, 2))
    assert 0 < step.seconds < predict(Plan(SMALL, layout, 2)).seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "float16"}, "reduce must be one of float32, bfloat16, got 'float16'"),
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, got 0"),
        ({"layout": Layout(pp=2), "batch": 2, "accumulate": 2}, "is for plans without a pipeline"),
    ],
)
def test_a_plan_rejects_invalid_gradient_options(change, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"sizes": SMALL, "layout": Layout(dp_shard=8), **change})
