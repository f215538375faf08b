"""Context-parallel plans: what ranks compute, keep and send, and what's rejected."""

import pytest

from vgpu.plan import Layout, Plan, predict
from vgpu.plan.transformer import TransformerSizes

SMALL = TransformerSizes(2, 256, 8, 8, 512, 1024, sequence=512)


def plan(layout, sequence=512, **options):
    return Plan(SMALL, layout, 1, sequence, gpus_per_host=4, **options)


def in_attention(step):
    return sum(e.flop for e in step.timeline.events if "attention" in e.name)


def test_ranks_divide_a_single_ranks_computation():
    """A rank computes the causal half of its own part, and half of its scores with other parts."""
    one, four = predict(plan(Layout())), predict(plan(Layout(cp=4)))
    assert in_attention(one) == 4 * in_attention(four)
    products = [step.timeline.flop - in_attention(step) for step in (one, four)]
    assert products[0] == 4 * products[1]
    assert four.plan.tokens == one.plan.tokens == 512


def test_keys_and_values_are_gathered_and_their_gradients_sent_around_a_ring():
    events = predict(plan(Layout(cp=4))).timeline.events
    both = 2 * 512 * SMALL.width  # keys and values of the full sequence
    gathers = [e for e in events if e.name == "all_gather" and e.size_bytes == 2 * both]
    assert len(gathers) == 2 * SMALL.layers  # backward gathers them again
    passed = [e.size_bytes for e in events if e.name == "all_to_all"]
    assert passed == [4 * both // 4] * 4 * SMALL.layers  # in float32


def test_parameters_are_sharded_across_context_parallel_ranks():
    few, many = (predict(plan(layout)) for layout in (Layout(dp_shard=4), Layout(2, 1, cp=4)))
    assert few.bytes_by_cause["parameters"] == pytest.approx(
        many.bytes_by_cause["parameters"], rel=0.05
    )


def test_context_parallelism_combines_with_tensor_parallelism_and_pipelines():
    step = predict(plan(Layout(tp=2, cp=2)))
    assert {"all_gather", "reduce_scatter", "all_to_all"} <= {e.name for e in step.timeline.events}
    step = predict(plan(Layout(cp=2, pp=2), recompute="full", micro_batches=1))
    assert in_attention(step)


def test_an_indivisible_sequence_length_is_rejected():
    with pytest.raises(ValueError, match=r"4 ranks can.t share a sequence of 500 .* multiple of 8"):
        plan(Layout(cp=4), sequence=500)
