"""How ranks are grouped, how a model is divided into stages, and when garbage is collected."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import vgpu
from vgpu.plan.layout import Layout, check_hosts, groups, split_layers
from vgpu.plan.parallel_model import pipeline_stage, without_garbage
from vgpu.plan.transformer import Transformer, TransformerSizes

SIZES = {"tensor": 4, "context": 2, "pipeline": 2, "data": 4}
MODEL = TransformerSizes(4, 256, 8, 4, 512, 1024, sequence=128)


@pytest.mark.parametrize("rank", [0, 5, 13])
def test_groups_match_a_device_mesh(rank):
    sizes = {"inner": 2, "middle": 4, "outer": 2}
    with vgpu.cluster(2, 8, rank=rank):
        mesh = init_device_mesh("vgpu", (2, 4, 2), mesh_dim_names=("outer", "middle", "inner"))
        for name in sizes:
            group = dist.get_process_group_ranks(mesh.get_group(name))
            assert group in groups(sizes, name)
            assert rank in group


def test_every_rank_is_in_one_group_of_each_dimension():
    for name in SIZES:
        several = groups(SIZES, name)
        assert sorted(itertools.chain(*several)) == list(range(64))
        assert {len(group) for group in several} == {SIZES[name]}


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=12, dp_replicate=2), Layout(tp=8, dp_shard=3), Layout(dp_shard=32)]
)
def test_groups_may_span_hosts_if_all_of_a_kind_span_them_the_same_way(layout):
    check_hosts(layout, 8)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=3, dp_replicate=8), Layout(tp=6, dp_shard=4), Layout(tp=3, pp=8)]
)
def test_groups_of_one_kind_placed_differently_on_hosts_are_rejected(layout):
    with pytest.raises(ValueError, match=r"differently.* Choose degrees that divide 8"):
        check_hosts(layout, 8)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (126, 8, [15, *[16] * 6, 15]),  # the result of torchtitan's own function
        (126, 16, [7, *[8] * 14, 7]),
        (6, 2, [3, 3]),
        (7, 2, [4, 3]),
        (4, 4, [1, 2, 1, 0]),
        (5, 1, [5]),
    ],
)
def test_embedding_and_output_each_count_as_a_layer(layers, stages, counts):
    found = split_layers(layers, stages)
    assert [part.layers for part in found] == counts
    assert [part.first for part in found] == [True, *[False] * (stages - 1)]
    assert [part.last for part in found] == [*[False] * (stages - 1), True]


def test_consecutive_stages_match_the_full_transformer():
    torch.manual_seed(0)
    whole, begin = Transformer(MODEL), 0
    tokens = hidden = torch.randint(MODEL.vocabulary, (2, MODEL.sequence))
    for part in split_layers(MODEL.layers, 4):
        stage = pipeline_stage(MODEL, part)
        own = {
            name.replace(f"blocks.{begin + number}.", f"blocks.{number}."): value
            for number in range(part.layers)
            for name, value in whole.state_dict().items()
            if name.startswith(f"blocks.{begin + number}.")
        }
        ends = {"embedding": part.first, "norm": part.last, "output": part.last}
        own |= {f"{n}.weight": getattr(whole, n).weight for n, here in ends.items() if here}
        stage.load_state_dict(own)
        hidden, begin = stage(hidden), begin + part.layers
    torch.testing.assert_close(hidden, whole(tokens))


class Cycle:
    def __init__(self):
        self.itself = self


def test_reference_cycles_left_by_a_block_are_collected_when_it_ends():
    kept, inside = Cycle(), None
    with without_garbage():
        inside = weakref.ref(Cycle())
        assert not gc.isenabled() and inside() is not None
    assert gc.isenabled() and inside() is None and kept.itself is kept


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_leaves_automatic_garbage_collection_unchanged(enabled):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(LookupError), without_garbage():
            raise LookupError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
