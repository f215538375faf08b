"""Asynchronous tensor parallelism: matmuls and their collectives in pieces, checked by hand.

In the toy model, a GPU reads and writes 1 kB in 1 µs, and arithmetic and launches are free. There
are four ranks, each with 1 kB of the 4 kB that are gathered: (200, 5) by (5, 10), whose result has
8 kB. A piece of the matmul reads 1 kB and the weight's 200 bytes and writes 2 kB: 3.2 µs.
"""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from toy_gpu import SPEC

import vgpu

FAST = vgpu.Link("1 kB in 1 µs", 1e9, 0.0, "made for these tests")
SLOW = vgpu.Link("1 kB in 5 µs", 0.2e9, 0.0, "made for these tests")
EXACT = {
    "memory_share": 1.0,
    "link_share": 1.0,
    "network_share": 1.0,
    "python_launch_s": 0.0,
    "engine_launch_s": 0.0,
    "kernel_s": 0.0,
    "fuses": True,
}
PIECE = 3.2


def near(microseconds):
    return pytest.approx(microseconds * 1e-6, rel=1e-9)


def empty(*size):
    return torch.empty(size, device="vgpu")


def recorded(program, link=FAST, hosts=1, **changes):
    """Record the program as rank 0 of four, in pieces; ``changes`` override ``EXACT``."""
    with vgpu.cluster(hosts, 4 // hosts, gpu=SPEC, link=link), vgpu.shapes_only():
        shard, whole, weights = empty(50, 5), empty(200, 5), [empty(5, 10) for _ in range(3)]
        with vgpu.record(**(EXACT | {"async_tp": True} | changes)) as timeline:
            kept = program(shard, whole, *weights)
            torch.vgpu.synchronize()
        del kept
    assert timeline.races == []
    return timeline


def launched(timeline):
    return [event.name for event in timeline.events if event.kind != "wait"]


def times(timeline):
    return [(e.name, e.kind, e.start_s, e.end_s, e.launch_s, e.ready_s) for e in timeline.events]


def gather(shard, dim=0):
    return functional.all_gather_single(shard, dim, dist.group.WORLD)


def scatter(product, dim=0):
    return functional.reduce_scatter_single(product, "sum", dim, dist.group.WORLD).wait()


# Times computed by hand


def one_product(shard, whole, weight, *others):
    return gather(shard) @ weight


# First, the rank's own piece is copied to where the others find it: 2 µs. On the fast link, pieces
# arrive while others are multiplied. On the slow one, three arrive in 5 µs each, and then the last
# is multiplied.
@pytest.mark.parametrize(("link", "wanted"), [(FAST, 2 + 4 * PIECE), (SLOW, 2 + 3 * 5 + PIECE)])
def test_a_gather_overlaps_with_the_pieces_of_its_matmul(link, wanted):
    timeline = recorded(one_product, link)
    assert timeline.makespan_s == timeline.host_s == near(wanted)
    assert sorted(launched(timeline)) == ["copy", *["mm"] * 4, *["permute"] * 3]
    sent = [event for event in timeline.events if event.name == "permute"]
    each = 1 if link is FAST else 5
    assert [event.start_s for event in sent] == [near(2 + each * k) for k in range(3)]
    assert {event.size_bytes for event in sent} == {1000}
    plain = recorded(one_product, link, async_tp=False)
    assert plain.makespan_s == near(3 * each + 4 + 0.2 + 8)
    assert launched(plain) == ["all_gather", "mm"]
    assert plain.flop == timeline.flop == 2 * 200 * 5 * 10


def test_matmuls_share_the_pieces_of_their_gather():
    def program(shard, whole, first, second, third):
        gathered = gather(shard)
        hidden = (gathered @ first).relu()
        return hidden * (gathered @ second)

    timeline = recorded(program)
    # The last kernel reads both results and writes one.
    assert timeline.makespan_s == near(2 + 8 * PIECE + 3 * 8)
    assert launched(timeline).count("permute") == 3
    # 5 µs is less than two matmuls of 3.2 µs, so the slow link is hidden, too.
    assert recorded(program, SLOW).makespan_s == timeline.makespan_s


@pytest.mark.parametrize(("link", "wanted"), [(FAST, 4 * PIECE), (SLOW, PIECE + 3 * 10)])
def test_a_reduce_scatter_overlaps_with_the_pieces_of_its_matmul(link, wanted):
    def program(shard, whole, weight, *others):
        return scatter(whole @ weight)

    timeline = recorded(program, link)
    # 2 kB are sent per piece. At the end, four pieces are read, and their sum is written.
    assert timeline.makespan_s == near(wanted + 4 * 2 + 2)
    assert sorted(launched(timeline)) == [*["mm"] * 4, *["permute"] * 3, "sum"]


def test_pieces_along_another_dimension_need_no_copy():
    def program(shard, whole, weight, second, third):
        gathered = gather(shard.view(2, 25, 5), 1)
        product = gathered @ weight
        del gathered
        return scatter((product * 2) @ empty(10, 5), 1)

    timeline, plain = recorded(program), recorded(program, async_tp=False)
    assert launched(plain) == [
        "all_gather",
        "fused",
        "mm",
        "fused",
        "mm",
        "fused",
        "reduce_scatter",
    ]
    assert launched(timeline).count("fused") == 1
    # (200, 10) by (10, 5): a piece reads 2 kB and 200 bytes and writes 1 kB, as much as before.
    assert timeline.makespan_s == near(2 + 4 * PIECE + 16 + 4 * PIECE + 4 + 1)


def test_other_readers_of_a_gather_start_after_its_matmuls():
    def program(shard, whole, weight, *others):
        gathered = gather(shard)
        return gathered @ weight, gathered.t() @ whole

    # The rank's own piece is copied to where the gathered ones are: 2 µs. (5, 200) by (200, 5)
    # takes 8.1 µs.
    assert recorded(program).makespan_s == near(2 + 4 * PIECE + 2 + 8.1)


@pytest.mark.parametrize("outlives", [False, True])
def test_a_gathered_tensor_is_copied_only_if_it_outlives_the_recording(outlives):
    def program(shard, whole, weight, *others):
        gathered = gather(shard.view(2, 25, 5), 1)
        return gathered @ weight, gathered if outlives else None

    # Like a forward pass whose backward pass is recorded separately.
    wanted = 2 + 4 * PIECE + (2 + 8 if outlives else 0)
    assert recorded(program).makespan_s == near(wanted)


# Unpaired operations


def both_factors(shard, whole, *weights):
    gathered = gather(shard.view(5, 50))  # (20, 50)
    return gathered @ gathered.view(50, 20)


def a_weight_of_it(shard, whole, weight, *others):
    gathered = gather(shard)
    return gathered @ (weight + gathered.sum())


def product_read_twice(shard, whole, weight, *others):
    product = whole @ weight
    return scatter(product), product.neg()


def on_another_stream(shard, whole, weight, *others):
    gathered = gather(shard).wait()
    other = torch.vgpu.Stream()
    other.wait_stream(torch.vgpu.current_stream())
    with other:
        return gathered.mm(weight)


STAY = {
    "elementwise between": lambda shard, whole, weight, *_: gather(shard).relu() @ weight,
    "gathered on the right": lambda shard, whole, *_: whole.view(5, 200) @ gather(shard),
    "summed over what was gathered": lambda shard, whole, *_: gather(shard).t() @ whole,
    "both factors": both_factors,
    "a weight that depends on the gather": a_weight_of_it,
    "product read twice": product_read_twice,
    "sum of products": lambda shard, whole, w, other, _: scatter(whole @ w + whole @ other),
    "on another stream": on_another_stream,
}


@pytest.mark.parametrize("name", STAY)
def test_unpaired_operations_keep_their_times(name):
    timeline = recorded(STAY[name])
    assert {"all_gather", "reduce_scatter"} & set(launched(timeline))
    assert times(timeline) == times(recorded(STAY[name], async_tp=False))


def test_a_group_across_hosts_keeps_its_times():
    timeline = recorded(one_product, hosts=2)
    assert launched(timeline) == ["all_gather", "mm"]
    assert times(timeline) == times(recorded(one_product, hosts=2, async_tp=False))


def test_async_tp_without_fusion_is_rejected():
    with pytest.raises(ValueError, match="needs fuses=True"):
        recorded(one_product, fuses=False)
    plain = recorded(one_product, fuses=False, async_tp=False)
    with pytest.raises(ValueError, match="needs fuses=True"):
        vgpu.replay(plain, async_tp=True)


# Replays and multiple ranks


def test_a_replay_can_switch_async_tp_on_and_off():
    timeline, plain = recorded(one_product), recorded(one_product, async_tp=False)
    assert times(vgpu.replay(plain, async_tp=True)) == times(timeline)
    assert times(vgpu.replay(timeline, async_tp=False)) == times(plain)
    assert vgpu.replay(timeline, link=SLOW).makespan_s == recorded(one_product, SLOW).makespan_s
    with vgpu.cluster(1, 4, gpu=SPEC, link=FAST):
        assert pickle.loads(pickle.dumps(timeline)) == timeline
