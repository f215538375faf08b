"""Figures, read through their alternative texts and what is drawn."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from helpers import plots
from helpers.plots import style
from vgpu import Timeline
from vgpu.plan.layout import groups

matplotlib.use("Agg")


@pytest.fixture
def drawn(monkeypatch):
    """The texts on each figure that was shown."""
    texts = []
    monkeypatch.setattr(
        style,
        "display",
        lambda picture: texts.append([t.get_text() for a in plt.gcf().axes for t in a.texts]),
    )
    return texts


@pytest.fixture
def alts(monkeypatch):
    """The alternative text of each figure that was shown."""
    texts = []
    monkeypatch.setattr(style, "display", lambda picture: texts.append(picture.alt))
    return texts


@pytest.mark.virtual_gpus(2)
def test_memories_draw_a_tensor_with_two_names_once(drawn):
    gpus = [torch.device("vgpu:0"), torch.device("vgpu:1")]
    x = torch.zeros(3)
    y = x.to(gpus[1])
    plots.memories({"x": x, "y": y, "z": y}, gpus, copies=[("x", "y")])
    assert drawn[0].count("x  (3,)") == 1 and "y, z  (3,)" in drawn[0] and ".to" in drawn[0]
    with pytest.raises(ValueError, match="not in list"):
        plots.memories({"x": y}, gpus[:1])
    assert not plt.get_fignums(), "a figure that cannot be drawn is not left open"


@pytest.mark.virtual_gpus(2)
def test_memories_say_where_each_tensor_is(alts):
    gpus = [torch.device("vgpu:0"), torch.device("vgpu:1")]
    x = torch.zeros(3)
    y = x.to(gpus[1])
    plots.memories({"x": x, "y": y, "z": y}, gpus, copies=[("x", "y")])
    assert "x in main memory; y and z in the memory of GPU 1; an arrow from x to y" in alts[0]


def test_relabelled_joins_cards_to_their_ordinals(alts):
    plots.relabelled({"1,3": [1, 3], "": []}, cards=4)
    assert '"1,3": cuda:0 is card 1, cuda:1 is card 3; "": none.' in alts[0]


def test_network_lists_the_layers_as_they_run(alts):
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU())
    plots.network(model, torch.rand(2, 2, 3))
    assert "input 2×3, Flatten 6, Linear 4, ReLU 4" in alts[0]
    assert not model[1]._forward_hooks


def test_who_holds_names_what_is_cut(alts):
    plots.who_holds({"nothing cut": [], "ZeRO-1": ["optimizer state"]}, gpus=2)
    assert "nothing cut: cut are none; ZeRO-1: cut are optimizer state" in alts[0]


def test_held_says_which_part_of_each_matrix_a_gpu_has(alts):
    plots.held([("", "x", 6, 8, "whole"), ("=", "y", 6, 4, "partial")], 2, "By rows")
    assert "x (6 by 8) all of it, y (6 by 4) a sum's part" in alts[0]
    with pytest.raises(ValueError, match="x is held 'half'; parts are whole, rows, columns"):
        plots.held([("", "x", 6, 8, "half")], 2, "By half")
    assert len(alts) == 1


def test_held_by_cause_adds_the_bytes_up(alts):
    held = {"parameters": 2**30, "optimizer state": 2 * 2**30}
    plots.held_by_cause({"4 shards": held}, 80 * 2**30, unit="GiB")
    assert alts == ["Bars of the bytes on each GPU, by cause. 4 shards 3.0 GiB. A GPU has 80 GiB."]


def test_mesh_names_the_groups_of_each_dimension(alts):
    sizes = {"inside": 4, "across": 2}
    plots.mesh({name: groups(sizes, name) for name in sizes}, gpus_per_host=4)
    assert "inside, 2 groups of 4, the first one ranks 0, 1, 2, 3" in alts[0]
    assert "across, 4 groups of 2, the first one ranks 0, 4" in alts[0]


def test_ring_work_says_who_computes_what(alts):
    plots.ring_work({"in order": [[3, 0], [3, 4]], "both ends": [[3, 2], [3, 2]]}, "products")
    assert "in order: rank 0 [3, 0], rank 1 [3, 4]; both ends: rank 0 [3, 2]" in alts[0]


def test_expert_load_counts_the_tokens_of_each_expert(alts):
    plots.expert_load([10, 2, 4, 0], experts_per_rank=2, capacity=5)
    assert "expert 0 10, expert 1 2" in alts[0]
    assert "the mean is 4, the capacity 5" in alts[0]


def test_split_times_and_gained_say_their_numbers(alts):
    timeline = Timeline("H100", [])
    timeline.makespan_s = 0.002
    plots.split_times({"1 GPU": timeline}, "A layer")
    plots.gained({1024: {1: 2e-3, 8: 1e-3}, 2048: {1: 4e-3, 8: 1e-3}}, "It gains", "virtual time")
    assert "1 GPU: 2.00 ms, 0% of it in collectives" in alts[0]
    assert "8 GPUs: 2.00 at width 1024, 4.00 at width 2048" in alts[1]


def test_same_batch_says_the_speed_at_both_ends(alts):
    speeds = {"fast": {2: 1.0, 4: 1.9, 8: 3.0}, "slow": {2: 1.0, 4: 1.2, 8: 1.1}}
    plots.same_batch(speeds, {2: 400, 4: 200, 8: 100})
    assert "fast: 1.00 on 2 GPUs, 3.00 on 8; slow: 1.00 on 2 GPUs, 1.10 on 8." in alts[0]


def test_goodput_says_where_it_is_highest(alts):
    points = {60.0: (0.5, 0.52), 600.0: (0.9, 0.91), 6000.0: (0.25, 0.2)}
    plots.goodput({512: points}, {512: 500.0})
    assert "with 512 GPUs it is highest near 8 min 20 s, at 90%, and 25% at the longest" in alts[0]


def test_by_batch_takes_the_mean_over_seeds(alts):
    plots.by_batch({("same", 16): [0.1, 0.3], ("same", 64): [1.0, 2.0], ("more", 64): [0.2, 0.2]})
    assert "batch 16, rate same: 0.20; batch 64, rate same: 1.50" in alts[0]


def test_latency_and_bandwidth_lists_sizes_with_their_times(alts):
    sizes = (16, 1024, 2**20)
    plots.latency_and_bandwidth(
        dict(zip(sizes, (1e-4, 1.1e-4, 2e-3), strict=True)), dict.fromkeys(sizes, 1e-4)
    )
    assert "16 B 100 µs, 1 MiB 2 ms" in alts[0]
