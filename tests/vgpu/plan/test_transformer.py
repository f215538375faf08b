"""The transformer: logits, attention, rotary positions, parameter counts, and initialization."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import vgpu
from vgpu.plan.transformer import (
    DEEPSEEK,
    LLAMA,
    LatentSizes,
    Transformer,
    TransformerSizes,
    rotated,
)

SMALL = TransformerSizes(
    layers=2, width=32, heads=4, key_value_heads=2, feed_forward=64, vocabulary=50, sequence=16
)
LATENT = dataclasses.replace(SMALL, key_value_heads=4, latent=LatentSizes(12, 10, 6))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(SMALL)


@pytest.fixture
def latent():
    torch.manual_seed(0)
    return Transformer(LATENT)


def test_a_transformer_returns_logits_for_each_position(model):
    assert model(torch.randint(50, (3, 16))).shape == (3, 16, 50)
    assert model(torch.randint(50, (3, 5))).shape == (3, 5, 50)


@pytest.mark.parametrize("kind", ["model", "latent"])
def test_no_position_attends_to_a_later_one(kind, request):
    model = request.getfixturevalue(kind)
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_attention_matches_an_explicit_calculation(model):
    """The calculation repeats each group's keys and values, and writes out the mask."""
    attention = model.blocks[0].attention
    x = torch.randn(2, 16, 32)
    query = attention.query(x).view(2, 16, 4, 8).transpose(1, 2)
    key = attention.key(x).view(2, 16, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    value = attention.value(x).view(2, 16, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    scores = turned(query, model) @ turned(key, model).transpose(-1, -2)
    found = attention(x, model.cos, model.sin)
    torch.testing.assert_close(found, attention.output(attended(scores / 8**0.5, value)))


def test_latent_attention_matches_an_explicit_calculation(latent):
    """The calculation keeps the parts with and without positions apart (DeepSeek-V2, eq. 9-19)."""
    attention = latent.blocks[0].attention
    x = torch.randn(2, 16, 32)
    queries = F.linear(normal(F.linear(x, attention.query_down.weight)), attention.query_up.weight)
    queries = queries.view(2, 16, 4, 14).transpose(1, 2)
    narrow = F.linear(x, attention.key_value_down.weight)
    both = F.linear(normal(narrow[..., :10]), attention.key_value_up.weight)
    both = both.view(2, 16, 4, 16).transpose(1, 2)
    placed_key = turned(narrow[..., 10:].view(2, 1, 16, 6), latent)
    scores = queries[..., :8] @ both[..., :8].transpose(-1, -2)
    scores = scores + turned(queries[..., 8:], latent) @ placed_key.transpose(-1, -2)
    wanted = attention.output(attended(scores / 14**0.5, both[..., 8:]))
    torch.testing.assert_close(attention(x, latent.cos, latent.sin), wanted)


def turned(heads, model):
    first, second = heads[..., 0::2], heads[..., 1::2]
    turned_first = first * model.cos - second * model.sin
    turned_second = first * model.sin + second * model.cos
    return torch.stack([turned_first, turned_second], -1).flatten(-2)


def attended(scores, value):
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 16, 32)


def normal(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_only_the_distance_between_positions_matters(model):
    """A query and a key three positions apart have the same dot product wherever they are."""
    query, key = torch.randn(8), torch.randn(8)
    turned = [rotated(v.expand(1, 1, 16, 8), model.cos, model.sin)[0, 0] for v in (query, key)]
    products = turned[0] @ turned[1].T
    torch.testing.assert_close(products[4, 1], products[10, 7])


def test_rotated_float64_vectors_keep_their_length():
    heads = torch.randn(2, 4, 16, 8, dtype=torch.double)
    angles = torch.rand(16, 4, dtype=torch.double)
    turned = rotated(heads, angles.cos(), angles.sin())
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1), rtol=1e-14, atol=0)


# The model cards: 8,030,261,248 for Llama 3.1 8B, and so on. DeepSeek-V3's 671,026,419,200 include
# 256 biases of the router in each of 58 blocks.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
        ("DeepSeek-V2", 235_741_434_880),
        ("DeepSeek-V3", 671_026_419_200 - 58 * 256),
    ],
)
@pytest.mark.virtual_gpus(1)
def test_parameter_counts_match_published_ones(name, parameters):
    sizes = (LLAMA | DEEPSEEK)[name]
    with vgpu.shapes_only():
        model = Transformer(sizes)
        assert sum(p.numel() for p in model.parameters()) == parameters == sizes.parameters


def test_a_model_created_on_the_meta_device_has_its_seeds_values():
    models = []
    for seed in (0, 0, 1):
        with torch.device("meta"):
            models.append(Transformer(SMALL))
        models[-1].to_empty(device="cpu").initialize(seed)
    one, same, other = models
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.output.weight, other.output.weight)
    usual = Transformer(SMALL)
    assert torch.equal(one.cos, usual.cos) and torch.equal(one.sin, usual.sin)
    assert torch.equal(one.norm.weight, usual.norm.weight)
    assert one.output.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
