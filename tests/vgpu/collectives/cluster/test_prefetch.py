"""FSDP2's own prefetching in forward, whose gathers run on high-priority streams."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import vgpu
from vgpu.plan.transformer import LLAMA, Transformer
from vgpu.time.timeline import covered_s

SIZES = replace(LLAMA["8B"], layers=4, vocabulary=32_000)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def forward(tokens):
    """Record one forward pass on one of 8 H100s."""
    with vgpu.cluster(hosts=1, gpu="H100"), vgpu.shapes_only(), torch.no_grad():
        model = Transformer(SIZES).to("vgpu")
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=BF16)
        model(torch.zeros(1, 8, dtype=torch.int64, device="vgpu"))  # creates the streams
        batch = torch.zeros(1, tokens, dtype=torch.int64, device="vgpu")
        with vgpu.record() as timeline:
            model(batch)
    return timeline


def exposed_s(timeline):
    """Return the exposed seconds of all gathers except the first."""
    kernels = [event for event in timeline.events if event.kind == "kernel"]
    gathers = [event for event in timeline.events if event.kind == "collective"][1:]
    return covered_s(kernels + gathers) - covered_s(kernels)


def test_a_large_batch_hides_every_gather_but_the_first():
    assert exposed_s(forward(2048)) < 1e-6
    assert exposed_s(forward(128)) > 1e-3
