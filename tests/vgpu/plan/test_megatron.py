"""Megatron-LM recipes: what each setting changes."""

import pytest

import vgpu
from vgpu.plan import megatron
from vgpu.plan.megatron import NOTHING, Run, Shares, recorded, step_s
from vgpu.plan.megatron_layers import GPTSizes

SHARES = Shares(0.7, 0.8)
WIDE = Run(GPTSizes(4, 4096, 32, 4096), 8, 1, 1, 8, 2, 2)
SMALL = Run(GPTSizes(4, 512, 8, 512), 1, 1, 1, 1, 1, 1)


def seconds(run, **changes):
    return step_s(run._replace(**changes), SHARES)


def test_a_published_model_has_its_published_parameter_count():
    assert megatron.ROWS[-1].run.sizes.parameters == pytest.approx(1008e9, rel=1e-3)


def test_recorded_parameters_match_the_model_sizes():
    sizes = GPTSizes(1, 512, 8, 512, 1024, key_value_heads=2, feed_forward=1536, gated=True)
    parts = recorded(Run(sizes, 2, 1, 1, 2, 1, 1, NOTHING, flash=True))
    ends = parts.embedding.parameters + sizes.sequence * sizes.width  # position table isn't divided
    products = 2 * parts.layer.parameters
    assert sizes.layer_products < products < 1.02 * sizes.layer_products
    assert ends >= sizes.vocabulary * sizes.width / 2


@pytest.mark.parametrize(
    "changes", [{}, {"key_value_heads": 2, "feed_forward": 1536, "gated": True}]
)
def test_the_formula_counts_every_parameter_of_a_layer(changes):
    sizes = GPTSizes(1, 512, 8, 512, 1024, **changes)
    more = sizes._replace(layers=2).parameters - sizes.parameters
    run = Run(sizes, 1, 1, 1, 1, 1, 1, NOTHING, flash=True)
    assert recorded(run).layer.parameters == more


def test_fused_attention_saves_time_and_grouped_query_attention_saves_more():
    unfused, fused = seconds(WIDE, dropout=0.0), seconds(WIDE, dropout=0.0, flash=True)
    grouped = WIDE.sizes._replace(key_value_heads=8)
    assert seconds(WIDE, sizes=grouped, dropout=0.0, flash=True) < fused < unfused


def test_small_layers_wait_for_the_host():
    slow, fast = (step_s(SMALL, Shares(share, 0.8)) for share in (0.4, 0.8))
    assert fast == pytest.approx(slow, rel=0.03)
    calls = len(recorded(SMALL).layer.forward.events)
    assert fast > SMALL.sizes.layers * calls * megatron.CALL_S


def test_tensor_parallelism_costs_the_host_six_collectives_per_layer():
    """Two in forward, two in recomputation and two in backward."""
    twice = SMALL._replace(tp=2, gpus=2)
    whole, divided = (
        megatron._seconds(recorded(run).layer, recorded(SMALL).layer, run, SHARES)
        for run in (SMALL, twice)
    )
    more_s = divided.forward + divided.backward - whole.forward - whole.backward
    assert more_s == pytest.approx(6 * megatron.CALL_S, rel=0.05)


def test_a_sharded_optimizer_and_overlap_save_time():
    run = WIDE._replace(gpus=32, batch=8)
    sharded = seconds(run, shards_optimizer=True)
    assert seconds(run, shards_optimizer=True, overlaps=True) < sharded < seconds(run)


def test_tensor_parallelism_is_slower_across_two_hosts_than_within_one():
    inside, across = (
        seconds(WIDE, tp=tp, gpus=16, batch=2 * 16 // tp) / (16 // tp) for tp in (8, 16)
    )
    assert across > inside


def test_a_pipeline_within_a_host_uses_its_links():
    costs = vgpu.CostModel(megatron.GPU, network=vgpu.NETWORKS[megatron.NETWORK], gpus_per_host=8)
    inside = WIDE._replace(tp=1, pp=8, batch=16)
    sent_bytes = 2 * 4096 * 2 * 4096
    found_s = megatron._transfer_s(inside, costs)
    assert found_s == pytest.approx(costs.copy_time_s(sent_bytes))
    assert found_s < megatron._transfer_s(inside._replace(gpus=64), costs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 12}, "12 GPUs aren't divisible by TP 8 × PP 1"),
        ({"batch": 3}, "a batch of 3 can't be divided evenly into micro-batches of 2"),
        ({"tp": 12, "gpus": 12}, "TP 12 doesn't fill hosts of 8"),
        ({"sizes": WIDE.sizes._replace(key_value_heads=8)}, "pass flash=True"),
    ],
)
def test_a_run_that_does_not_divide_evenly_is_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        seconds(WIDE, **changes)
