"""Lesson 12's explorer: bytes for each strategy, compared with those allocated and sent."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import vgpu
from helpers.widgets import sharding
from helpers.widgets.sharding import WAYS, answer, sharding_explorer
from vgpu.plan.transformer import LETTERS, LLAMA, Transformer

DDP, ZERO_1, ZERO_2, FSDP, HSDP = WAYS
SHAPE = replace(LLAMA["8B"], layers=3, vocabulary=8_000)


@pytest.mark.parametrize(
    ("name", "published"),  # Llama 3.1's model cards
    [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
def test_parameter_counts_match_those_published(name, published):
    assert LLAMA[name].parameters == published


def test_each_strategy_shards_its_part_of_the_sixteen_bytes_per_parameter():
    count = LETTERS.parameters
    per_parameter = {way: answer(LETTERS, 64, way).at_rest_bytes / count for way in WAYS}
    assert per_parameter == pytest.approx(
        {DDP: 16, ZERO_1: 4 + 12 / 64, ZERO_2: 2 + 14 / 64, FSDP: 16 / 64, HSDP: 16 / 8}, rel=1e-4
    )


def test_hybrid_sharding_shards_within_a_host_so_more_hosts_save_no_memory():
    on_8, on_64 = (answer(LETTERS, gpus, HSDP) for gpus in (8, 64))
    assert on_8.held == on_64.held and on_8.inside_bytes == on_64.inside_bytes
    assert on_8.across_bytes == 0 < on_64.across_bytes < on_64.inside_bytes
    assert on_8 == answer(LETTERS, 8, FSDP)


def test_one_gpu_holds_everything_and_sends_nothing():
    for way in WAYS:
        alone = answer(LETTERS, 1, way)
        assert alone.inside_bytes == alone.across_bytes == 0
        assert sum(alone.held.values()) == 16 * alone.parameters


def fully_sharded(hosts, **mesh_sizes):
    """Return what FSDP2 keeps and sends on rank 0: bytes kept, and the collectives of a step.

    Gradients are reduced in bfloat16, as the explorer assumes.
    """
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with vgpu.cluster(hosts=hosts) as cluster, vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (*mesh_sizes.values(),), mesh_dim_names=(*mesh_sizes,))
        model = Transformer(SHAPE).to("vgpu")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=bf16, reshard_after_forward=True)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        tokens = torch.zeros(1, 8, dtype=torch.int64, device="vgpu")
        with vgpu.record() as timeline:
            model(tokens).sum().backward()
        optimizer.step()
        kept_bytes = torch.vgpu.memory_allocated()
        return kept_bytes, [e for e in timeline.of(cluster.device) if e.kind == "collective"]


def test_answer_matches_what_fully_shard_keeps_and_sends():
    """FSDP2 runs on rank 0 of 8."""
    found = answer(SHAPE, 8, FSDP)
    kept_bytes, collectives = fully_sharded(1, shard=8)
    sent_bytes = sum(7 / 8 * event.size_bytes for event in collectives)
    # In float32, shards of parameters, gradients and two moments also add up to 16 bytes.
    assert kept_bytes == pytest.approx(found.at_rest_bytes, rel=0.02)
    assert sent_bytes == pytest.approx(found.inside_bytes, rel=0.001)


def test_answer_matches_what_hybrid_sharding_sends_inside_and_across_hosts():
    """FSDP2 runs on rank 0 of 4 hosts with 8 GPUs each."""
    found = answer(SHAPE, 32, HSDP)
    _, collectives = fully_sharded(4, replicate=4, shard=8)
    across = [event for event in collectives if event.name == "all_reduce"]
    inside = [event for event in collectives if event.name != "all_reduce"]
    assert {len(event.ranks) for event in across} == {4}
    across_bytes = sum(2 * 3 / 4 * event.size_bytes for event in across)
    inside_bytes = sum(7 / 8 * event.size_bytes for event in inside)
    assert across_bytes == pytest.approx(found.across_bytes, rel=0.001)
    assert inside_bytes == pytest.approx(found.inside_bytes, rel=0.001)


def test_answer_rejects_partly_filled_hosts():
    with pytest.raises(ValueError, match="12 GPUs are neither full hosts"):
        answer(LETTERS, 12, DDP)


def test_the_controls_redraw(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "helpers.plots.held_by_cause", lambda held, **how: drawn.append((held, how))
    )
    explorer = sharding_explorer()
    model, gpu = explorer.children[0].children
    gpus, way = explorer.children[1].children
    model.value, gpu.value, gpus.value, way.value = "8B", "A100", 8, DDP
    held, how = drawn[-1]
    assert list(held) == list(WAYS) and "Llama 8B on 8 GPUs" in how["message"]
    assert how["capacity_bytes"] == vgpu.PRESETS["A100"].memory_bytes
    texts = "".join(str(output) for output in explorer.children[2].outputs)
    assert "does not fit" in texts


def test_show_answer_works_without_the_widget(capsys):
    sharding.show_answer("70B", 64, FSDP, "H100")
    shown = capsys.readouterr().out
    assert "fits, without activations" in shown
