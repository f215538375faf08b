"""Experts: results match a loop over tokens; what plans with experts send, and what's rejected."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vgpu import launch
from vgpu.plan import Layout, Plan, predict
from vgpu.plan.estimate import flop_per_token
from vgpu.plan.experts import Experts, ExpertSizes
from vgpu.plan.transformer import MIXTRAL, LatentSizes, Transformer, TransformerSizes

EXPERTS = ExpertSizes(4, 2, 32)
SMALL = TransformerSizes(2, 64, 4, 4, 128, 256, sequence=64, experts=EXPERTS)


def made(sizes=EXPERTS, seed=0):
    torch.manual_seed(seed)
    return Experts(16, sizes, None)


def one_by_one(module, tokens, ranks=None):
    """Send each token through its experts, as if each expert had room for all tokens.

    ``ranks`` is the number of ranks, out of two, that a token may be sent to.
    """
    chances = F.linear(tokens, module.router).softmax(-1)
    if ranks == 1:
        halves = chances.unflatten(-1, (2, -1))
        best = halves.amax(-1, keepdim=True)
        chances = torch.where(best == best.amax(1, keepdim=True), halves, 0).flatten(1)
    weights, experts = chances.topk(module.sizes.per_token)
    weights = weights / weights.sum(-1, keepdim=True)
    own, outputs = module.own, []
    for token, given, chosen in zip(tokens, weights, experts, strict=True):
        output = 0
        for weight, e in zip(given, chosen.tolist(), strict=True):
            gate, up = (token @ own.gate_up[e]).chunk(2)
            output = output + weight * (F.silu(gate) * up) @ own.down[e]
        outputs.append(output)
    return torch.stack(outputs)


def test_experts_with_enough_slots_match_a_loop_over_tokens():
    module = made(dataclasses.replace(EXPERTS, capacity=4.0))
    x = torch.randn(2, 6, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    output, expected = module(x), one_by_one(module, y.flatten(0, 1))
    torch.testing.assert_close(output.flatten(0, 1), expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_full_expert_drops_additional_tokens():
    module = made(ExpertSizes(2, 1, 32, capacity=1.0))
    with torch.no_grad():
        module.router[1] = -module.router[0]
        tokens = (
            module.router[0].expand(1, 6, 16) + 0
        )  # all choose the first expert, which has 3 slots
        output = module(tokens)[0]
    assert output[:3].abs().sum() > 0 and not output[3:].any()


def whole_and_part(rank, world_size):
    module, part = made(), made()
    part.divide(init_device_mesh("cpu", (world_size,)))
    torch.manual_seed(1 + rank)
    x = torch.randn(2, 8, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, output = module(x), part(y)
    expected.square().sum().backward()
    output.square().sum().backward()
    dist.all_reduce(module.own.gate_up.grad)
    mine = module.own.gate_up.grad.chunk(world_size)[rank]
    pairs = (output, expected), (y.grad, x.grad), (part.own.gate_up.grad, mine)
    return [float((a - b).abs().max()) for a, b in pairs]


def test_experts_divided_across_ranks_match_a_rank_with_all_of_them():
    for differences in launch.run(whole_and_part, 2):
        assert max(differences) < 1e-4


def limited_part(rank, world_size, ranks_per_token):
    part = made(dataclasses.replace(EXPERTS, capacity=4.0, ranks_per_token=ranks_per_token))
    whole = made()
    part.divide(init_device_mesh("cpu", (world_size,)))
    torch.manual_seed(1 + rank)
    x = torch.randn(6, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, output = one_by_one(whole, x, ranks_per_token), part(y)
    expected.square().sum().backward()
    output.square().sum().backward()
    dist.all_reduce(whole.own.gate_up.grad)
    mine = whole.own.gate_up.grad.chunk(world_size)[rank]
    pairs = [(output, expected), (y.grad, x.grad), (part.own.gate_up.grad, mine)]
    pairs.append((part.router.grad, whole.router.grad))
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("ranks_per_token", [1, 2])
def test_experts_limited_to_some_ranks_match_a_loop_over_tokens(ranks_per_token):
    for differences in launch.run(limited_part, 2, ranks_per_token):
        assert max(differences) < 1e-4


def test_parameters_and_flops_match_the_model():
    shared = dataclasses.replace(EXPERTS, shared_width=48, dense_layers=1)
    for sizes in (SMALL, dataclasses.replace(SMALL, experts=shared)):
        with torch.device("meta"):
            model = Transformer(sizes)
        assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert MIXTRAL["8x7B"].parameters == pytest.approx(46.7e9, rel=0.001)
    used = flop_per_token(MIXTRAL["8x7B"], 0) / 6  # 12.9 billion with the embedding
    assert used + 32_000 * 4096 == pytest.approx(12.9e9, rel=0.002)


def plan(layout, sizes=SMALL, **options):
    return Plan(sizes, layout, 2, gpus_per_host=4, **options)


def test_ep_ranks_exchange_slots_and_gather_only_their_own_experts():
    alone, shared = predict(plan(Layout(dp_shard=4))), predict(plan(Layout(dp_shard=4, ep=2)))
    sent = [e.size_bytes for e in shared.timeline.events if e.name == "all_to_all"]
    slots_bytes = 2 * 2 * 64 * EXPERTS.per_token * SMALL.width
    assert sent == [slots_bytes] * 4 * SMALL.layers
    assert not any(e.name == "all_to_all" for e in alone.timeline.events)
    limited = dataclasses.replace(SMALL, experts=dataclasses.replace(EXPERTS, ranks_per_token=1))
    step = predict(plan(Layout(dp_shard=4, ep=2), limited))
    tokens, each = 2 * 64, EXPERTS.count // 2
    sizes = {e.size_bytes for e in step.timeline.events if e.name == "all_to_all"}
    assert sizes == {2 * tokens * SMALL.width, 4 * tokens * each}  # tokens, and weights in float32
    gathered = [
        sum(e.size_bytes for e in step.timeline.events if e.name == "all_gather")
        for step in (alone, shared)
    ]
    each = 2 * 3 * SMALL.width * EXPERTS.width * EXPERTS.count * SMALL.layers  # forward or backward
    assert gathered[0] - gathered[1] == 2 * each // 2
    flop = [step.timeline.flop for step in (alone, shared)]
    assert flop[0] == flop[1]


def test_experts_combine_with_pipelines_context_and_recomputation():
    dense = dataclasses.replace(
        SMALL, layers=4, experts=dataclasses.replace(EXPERTS, dense_layers=1)
    )
    assert predict(plan(Layout(dp_shard=2, pp=2, ep=2), dense, recompute="full")).fits
    assert predict(plan(Layout(dp_shard=2, cp=2, ep=4))).fits
    assert predict(plan(Layout(dp_shard=2), recompute="selective")).fits
    latent = dataclasses.replace(dense, latent=LatentSizes(32, 16, 8))
    assert predict(plan(Layout(dp_shard=2, pp=2, ep=2), latent, recompute="full")).fits
    assert predict(plan(Layout(dp_shard=2, cp=2, ep=4), latent)).fits
    assert predict(plan(Layout(dp_shard=2), latent, recompute="selective")).fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "sizes": dataclasses.replace(SMALL, experts=ExpertSizes(6, 2, 8)),
                "layout": Layout(dp_shard=4, ep=4),
            },
            "6 experts can't be divided evenly among 4 ep ranks",
        ),
        ({"layout": Layout(dp_shard=2, ep=2), "recompute": "selective"}, "use none or full"),
        ({"layout": Layout(tp=2)}, "with tensor parallelism"),
        (
            {"sizes": dataclasses.replace(SMALL, experts=ExpertSizes(2, 3, 8))},
            "through 3 of 2 experts",
        ),
        (
            {"sizes": dataclasses.replace(SMALL, experts=None), "layout": Layout(dp_shard=2, ep=2)},
            "ep = 2 needs experts",
        ),
        (
            {"sizes": dataclasses.replace(SMALL, experts=ExpertSizes(2, 1, 8, capacity=0.0))},
            "capacity must be above 0 and at most the number of experts",
        ),
        (
            {"sizes": dataclasses.replace(SMALL, experts=ExpertSizes(2, 1, 8, capacity="all"))},
            "capacity must be above 0 .*, got 'all'",
        ),
        (
            {
                "sizes": dataclasses.replace(
                    SMALL, experts=ExpertSizes(8, 3, 8, ranks_per_token=1)
                ),
                "layout": Layout(dp_shard=4, ep=4),
            },
            "3 experts can't be on 1 of 4 ep ranks, which have 2 each",
        ),
    ],
)
def test_impossible_expert_settings_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"layout": Layout(), **options})
    with pytest.raises(ValueError, match="ep = 2 must divide dp_shard × cp = 3"):
        Layout(dp_shard=3, ep=2)
