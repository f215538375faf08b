"""Back-of-the-envelope estimates match what PyTorch's own code computes and sends on a cluster."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vgpu
from vgpu.plan import estimate
from vgpu.plan.estimate import DIMENSIONS, mesh_step
from vgpu.plan.layout import groups
from vgpu.plan.transformer import (
    DEEPSEEK,
    LLAMA,
    MIXTRAL,
    Transformer,
    TransformerSizes,
)

MODEL = dataclasses.replace(LLAMA["70B"], sequence=8192)
SIZES = {"tensor": 4, "context": 2, "pipeline": 2, "data": 4}


def cost(gpus_per_host=8, network="InfiniBand NDR", **shares):
    return vgpu.CostModel(
        vgpu.PRESETS["H100"],
        network=vgpu.NETWORKS[network],
        gpus_per_host=gpus_per_host,
        **shares,
    )


def test_estimated_flops_match_a_flop_counter():
    small = TransformerSizes(2, 256, 8, 4, 512, 1024, sequence=128)
    model, tokens = Transformer(small), torch.zeros(1, 128, dtype=torch.int64)
    # For fused attention on the CPU, torch 2.15 counts the scores twice in backward, and 2.14 not
    # at all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == 128 * estimate.flop_per_token(small, 128)


def test_estimated_bytes_match_what_pytorch_sends_on_a_cluster():
    """FSDP2 and tensor parallelism with one sequence on each of 2 hosts; blocks only."""
    layers, tensor, data = 2, 4, 2
    model = dataclasses.replace(LLAMA["8B"], layers=layers, vocabulary=1024, sequence=512)
    found = mesh_step(
        {"tensor": tensor, "context": 1, "pipeline": 1, "data": data}, model, data, cost(4)
    )
    sent = sent_on_a_cluster(model, tensor, data)
    hidden_bytes = 512 * model.width * 2
    assert sent["all_reduce"] == 4 * layers * hidden_bytes
    assert found.of("tensor").sent_bytes == 2 * (tensor - 1) / tensor * sent["all_reduce"]
    # Tensor parallelism doesn't shard norms. FSDP keeps the gathered parameters of a root module.
    block = model.block_products / tensor + 2 * model.width
    assert sent["all_gather"] == layers * block * 2
    assert sent["reduce_scatter"] == layers * block * 4
    ends = 2 * model.vocabulary * model.width / tensor
    blocks_bytes = found.of("data").sent_bytes - (data - 1) / data * ends * (2 + 4)
    both = sent["all_gather"] + sent["reduce_scatter"]
    assert blocks_bytes == pytest.approx((data - 1) / data * both, rel=1e-3)


def sent_on_a_cluster(model, tensor, data):
    """Return the bytes of the blocks' collectives in one step, by kind."""
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=(Replicate(), None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        "attention.output": RowwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
    with vgpu.cluster(data, tensor, gpu="H100"), vgpu.shapes_only():
        ranks = torch.arange(data * tensor).view(data, tensor)
        mesh = DeviceMesh("vgpu", ranks, mesh_dim_names=("data", "tensor"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks = Transformer(model).blocks.to("vgpu")
        for block in blocks:
            parallelize_module(block, mesh["tensor"], plan)
            fully_shard(block, mesh=mesh["data"], mp_policy=policy)
        hidden = torch.empty(1, 512, model.width, device="vgpu", dtype=torch.bfloat16)
        angles = torch.empty(512, model.width // model.heads // 2, device="vgpu")
        with vgpu.record() as timeline:
            for block in blocks:
                hidden = block(hidden.requires_grad_(), angles, angles)
            hidden.sum().backward()
    sent = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0)
    for event in timeline.events:
        if event.kind == "collective":
            sent[event.name] += event.size_bytes
    return sent


def test_one_gpu_sends_nothing_and_computes_six_flops_per_parameter_per_token():
    small = dataclasses.replace(LLAMA["8B"], sequence=64)
    found = mesh_step(dict.fromkeys(DIMENSIONS, 1), small, 4, cost())
    assert [each.sent_bytes for each in found.traffic] == [0] * 4
    assert found.seconds == found.compute_s
    flop = found.compute_s * vgpu.PRESETS["H100"].tensor_flop_per_s * 0.5
    matrices = small.block_products * small.layers
    assert flop == pytest.approx(6 * matrices * 4 * 64, rel=0.01)  # attention is small here


def test_a_mesh_divides_the_computation_but_not_the_result():
    whole = mesh_step(dict.fromkeys(DIMENSIONS, 1), MODEL, 64, cost())
    for name, size in SIZES.items():
        cut = mesh_step(dict.fromkeys(DIMENSIONS, 1) | {name: size}, MODEL, 64, cost())
        assert cut.compute_s == pytest.approx(whole.compute_s / size)
        if name != "pipeline":
            assert cut.bubble_s == 0
    held = [
        mesh_step(dict.fromkeys(DIMENSIONS, 1) | {name: 2}, MODEL, 64, cost()).held_bytes
        for name in ("tensor", "pipeline", "data", "context")
    ]
    assert held[0] == held[1] == whole.held_bytes / 2
    assert held[2] == held[3] == whole.held_bytes * (2 + 4 + 6) / 18


def test_the_bubble_matches_1f1b():
    found = mesh_step({"tensor": 1, "context": 1, "pipeline": 8, "data": 8}, MODEL, 64, cost())
    assert found.bubble_s / found.compute_s == pytest.approx((8 - 1) / 8)


def test_ring_attention_sends_the_bytes_counted_on_ranks_in_lesson_14():
    """It sends keys and values n - 1 times, then n times together with gradients in float32."""
    found = mesh_step(dict.fromkeys(DIMENSIONS, 1) | {"context": 4}, MODEL, 1, cost())
    keys = 8192 // 4 * 128 * 8
    assert found.of("context").sent_bytes == MODEL.layers * (3 * 2 * keys * 2 + 4 * 2 * keys * 6)


def test_ring_attention_hides_a_message_behind_the_attention_of_one_block():
    costs = cost(gpus_per_host=1, network="Ethernet 100")
    found = mesh_step(dict.fromkeys(DIMENSIONS, 1) | {"context": 4}, MODEL, 1, costs)
    tokens = 8192 // 4
    # Two matmuls of a rank's queries with one rank's keys and values; the mask hides half.
    block_s = 2 * 2 * tokens**2 * MODEL.width / 2 / (0.5 * 989e12)
    bytes_of_keys = tokens * 128 * 8 * 2
    forward_s, backward_s = (
        costs.group_time_s("send", 2 * count * bytes_of_keys, (0, 1)) for count in (1, 3)
    )
    assert 2 * block_s < forward_s
    exposed_s = 3 * (forward_s - block_s) + 4 * (backward_s - 2 * block_s)
    assert found.of("context").exposed_s == pytest.approx(MODEL.layers * exposed_s)


def test_a_slow_network_slows_only_traffic_that_crosses_it():
    fast, slow = (
        mesh_step(SIZES, MODEL, 64, cost(network=n)) for n in ("InfiniBand NDR", "Ethernet 100")
    )
    for name in ("tensor", "context"):  # 4 × 2 ranks fill a host
        assert fast.of(name) == slow.of(name)
    for name in ("pipeline", "data"):
        assert slow.of(name).exposed_s > fast.of(name).exposed_s
        assert slow.of(name).link == "Ethernet, 100 Gb/s, TCP"


def test_the_slowest_group_determines_the_time():
    found = mesh_step({"pipeline": 5, "data": 8, "tensor": 1, "context": 1}, MODEL, 64, cost())
    assert found.of("pipeline").ranks == (
        15,
        16,
        17,
        18,
        19,
    )  # four on one host, and one on another
    assert found.of("pipeline").link == "InfiniBand NDR"
    # For each of 8 micro-batches, one message in each direction; all wait for the pair 15, 16.
    between_s = cost().group_time_s("send", 8192 * MODEL.width * 2, (15, 16))
    assert found.of("pipeline").sending_s == pytest.approx(16 * between_s)
    # 3 × 2 ranks hold the same parameters: 0 to 5 on one host, 6 to 11 on two.
    sizes = {"context": 2, "data": 3, "tensor": 4, "pipeline": 1}
    held = mesh_step(sizes, MODEL, 3, cost())
    assert held.of("data").ranks == (6, 7, 8, 9, 10, 11)
    assert groups(sizes, "data", "context")[:2] == [[*range(6)], [*range(6, 12)]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 16}, "8 key-value heads aren't divisible by tensor = 16"),
        ({"pipeline": 3}, "80 layers aren't divisible by pipeline = 3"),
        ({"data": 3}, "64 sequences aren't divisible by data = 3"),
        ({"context": 3}, "8192 tokens per sequence aren't divisible by context = 3"),
        ({"tensor": 0}, "each at least 1"),
        ({"expert": 2}, "sizes must have tensor, context, pipeline, data"),
    ],
)
def test_the_error_for_an_impossible_mesh_names_the_size(changes, words):
    with pytest.raises(ValueError, match=words):
        mesh_step(SIZES | changes, MODEL, 64, cost())


@pytest.mark.parametrize("sizes", [MIXTRAL["8x7B"], DEEPSEEK["DeepSeek-V3"]])
def test_a_mesh_rejects_experts(sizes):
    with pytest.raises(ValueError, match="a step on a mesh isn't modeled for models with experts"):
        mesh_step(SIZES, sizes, 64, cost())
