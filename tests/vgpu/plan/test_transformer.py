"""The transformer: logits, attention, rotary positions, parameter counts, and initialization."""

import pytest
import torch

import vgpu
from vgpu.plan.transformer import LLAMA, Transformer, TransformerSizes, rotated

SMALL = TransformerSizes(
    layers=2, width=32, heads=4, key_value_heads=2, feed_forward=64, vocabulary=50, sequence=16
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(SMALL)


def test_a_transformer_returns_logits_for_each_position(model):
    assert model(torch.randint(50, (3, 16))).shape == (3, 16, 50)
    assert model(torch.randint(50, (3, 5))).shape == (3, 5, 50)


def test_no_position_attends_to_a_later_one(model):
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
    found = attention(x, model.cos, model.sin)

    def turned(heads):
        first, second = heads[..., 0::2], heads[..., 1::2]
        turned_first = first * model.cos - second * model.sin
        turned_second = first * model.sin + second * model.cos
        return torch.stack([turned_first, turned_second], -1).flatten(-2)

    query = attention.query(x).view(2, 16, 4, 8).transpose(1, 2)
    key = attention.key(x).view(2, 16, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    value = attention.value(x).view(2, 16, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    scores = turned(query) @ turned(key).transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    wanted = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 16, 32)
    torch.testing.assert_close(found, attention.output(wanted))


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


# Llama 3.1's model cards: 8,030,261,248 and so on.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
@pytest.mark.virtual_gpus(1)
def test_llama_parameter_counts_match_published_ones(name, parameters):
    with vgpu.shapes_only():
        model = Transformer(LLAMA[name])
        assert sum(p.numel() for p in model.parameters()) == parameters == LLAMA[name].parameters


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
