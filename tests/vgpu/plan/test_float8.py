"""Float8 linear layers: their values, which matmuls plans run in float8, and what ranks send."""

import dataclasses

import pytest
import torch
from torch import nn

import vgpu
from vgpu.plan import Layout, Plan, predict
from vgpu.plan.float8 import Float8Linear, use_float8
from vgpu.plan.transformer import TransformerSizes

SMALL = TransformerSizes(2, 256, 8, 4, 512, 1024, sequence=128)


def plan(layout, **options):
    return Plan(SMALL, layout, 2, 128, gpus_per_host=4, **options)


def test_output_and_gradients_match_a_linear_layer_up_to_rounding():
    torch.manual_seed(0)
    with vgpu.enable(1, gpu="H100"):
        plain = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16().to("vgpu")
        layer = nn.Sequential(nn.Linear(64, 32, bias=False))
        use_float8(layer)
        assert type(layer[0]) is Float8Linear
        layer.bfloat16().to("vgpu").load_state_dict(plain.state_dict())
        x = torch.randn(2, 48, 64, dtype=torch.bfloat16)
        results = []
        for module in (plain, layer):
            mine = x.to("vgpu").requires_grad_()
            output = module(mine)
            output.square().sum().backward()
            found = (output.detach(), mine.grad, module[0].weight.grad)
            results.append([each.cpu().float() for each in found])
    for expected, found in zip(*results, strict=True):
        assert 0 < (found - expected).norm() < 0.06 * expected.norm()


def test_blocks_use_float8_matmuls_and_the_output_layer_does_not():
    plain, step = predict(plan(Layout(dp_shard=4))), predict(plan(Layout(dp_shard=4), float8=True))
    counts = [
        {name: sum(e.name == name for e in each.timeline.events) for name in ("mm", "_scaled_mm")}
        for each in (plain, step)
    ]
    outputs = 3
    assert counts == [
        {"mm": outputs + 2 * 21, "_scaled_mm": 0},
        {"mm": outputs, "_scaled_mm": 2 * 21},
    ]
    assert step.timeline.flop == plain.timeline.flop


def test_layers_that_share_an_input_cast_it_once():
    step = predict(plan(Layout(), float8=True))
    largest = [e for e in step.timeline.events if e.name == "amax" and not e.backward]
    weights, inputs = 7, 4  # queries, keys and values share one; so do gate and up
    assert len(largest) == SMALL.layers * (weights + inputs)


def test_tp_ranks_gather_float8_and_reduce_the_maximum():
    def gathered(**options):
        events = predict(plan(Layout(tp=4), **options)).timeline.events
        return [e.size_bytes for e in events if e.name == "all_gather"]

    whole = 2 * 128 * SMALL.width  # elements of the hidden states
    plain, small = gathered(), gathered(float8=True)
    assert plain.count(2 * whole) - small.count(2 * whole) == 4 * SMALL.layers
    assert small.count(whole) == 4 * SMALL.layers
    events = predict(plan(Layout(tp=4), float8=True)).timeline.events
    assert any(e.name == "all_reduce" and e.size_bytes <= 4 for e in events)


def test_selective_recomputation_keeps_every_other_matmul():
    step = predict(plan(Layout(), float8=True, recompute="selective"))
    plain = predict(plan(Layout(), recompute="selective"))
    assert step.timeline.flop == plain.timeline.flop


def test_a_gpu_without_float8_is_rejected():
    with pytest.raises(ValueError, match=r"A100.* can't multiply float8.* H100, H200, B200"):
        dataclasses.replace(plan(Layout()), float8=True, gpu="A100")
