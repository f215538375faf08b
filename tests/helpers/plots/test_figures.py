"""Figures, checked by their alternative text and by what they draw."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from helpers import plots
from helpers.plots import style

matplotlib.use("Agg")


@pytest.fixture
def drawn(monkeypatch):
    """The text drawn on each figure that was shown."""
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
def test_memories_draws_a_tensor_with_two_names_once(drawn):
    gpus = [torch.device("vgpu:0"), torch.device("vgpu:1")]
    x = torch.zeros(3)
    y = x.to(gpus[1])
    plots.memories({"x": x, "y": y, "z": y}, gpus, copies=[("x", "y")])
    assert drawn[0].count("x  [0, 0, 0]") == 1 and "y, z  [0, 0, 0]" in drawn[0]
    assert ".to" in drawn[0]
    with pytest.raises(ValueError, match="not in list"):
        plots.memories({"x": y}, gpus[:1])
    assert not plt.get_fignums(), "a figure that can't be drawn must be closed"


@pytest.mark.virtual_gpus(2)
def test_memories_says_where_each_tensor_is(alts):
    gpus = [torch.device("vgpu:0"), torch.device("vgpu:1")]
    x = torch.zeros(3)
    y = x.to(gpus[1])
    plots.memories({"x": x, "y": y, "z": y}, gpus, copies=[("x", "y")])
    assert "x in main memory; y and z in the memory of GPU 1; an arrow from x to y" in alts[0]


def test_replica_sizes_draws_batches_that_are_split_alike_once(drawn):
    a, b = torch.device("vgpu:0"), torch.device("vgpu:1")
    plots.replica_sizes({2: [[(b, 3), (a, 4)], [(a, 4), (b, 3)], [(a, 1)]]})
    assert drawn[0] == ["4", "3", "1", "idle"]


@pytest.mark.virtual_gpus(2)
def test_split_grid_says_which_gpu_got_what(alts):
    sequences, gpus = torch.zeros(5, 2, 1, device="vgpu:0"), [0, 1]
    for dim in (0, 1):
        chunks = nn.parallel.scatter(sequences, gpus, dim)
        plots.split_grid(chunks, torch.full((5, 2), 0.25), dim, "split")
    assert "3 time steps on vgpu:0, 2 time steps on vgpu:1" in alts[0] and "is 0.25" in alts[0]
    assert "1 sequences on vgpu:0, 1 sequences on vgpu:1" in alts[1]


def test_idle_gpus_lists_the_batches_that_leave_gpus_idle(alts):
    plots.idle_gpus({1: 1, 2: 0, 3: 0}, 2)
    assert "1 at 1; otherwise 0" in alts[0]


def test_where_layers_run_lists_each_layers_gpu_and_samples(alts):
    plots.where_layers_run({"Split layers": {("vgpu:1", "layer 1", 8), ("vgpu:0", "layer 0", 8)}})
    assert "layer 0 on vgpu:0 sees 8 samples, layer 1 on vgpu:1 sees 8 samples" in alts[0]


def test_network_lists_the_layers_in_the_order_in_which_they_run(alts):
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU())
    plots.network(model, torch.rand(2, 2, 3))
    assert "input 2×3, Flatten 6, Linear 4, ReLU 4" in alts[0]
    assert not model[1]._forward_hooks


def test_first_to_differ_orders_the_parts_by_their_first_difference(alts):
    apart = {"never": [0.0, 0.0], "later": [0.0, 0.2], "at once": [0.1, 0.0]}
    plots.first_to_differ(apart, "cpu")
    rows = "without at once, from loss 1 on; without later, from loss 2 on; without never, no loss differs"
    assert rows in alts[0], alts


def test_held_says_which_part_of_each_matrix_a_gpu_has(alts):
    plots.held([("", "x", 6, 8, "whole"), ("=", "y", 6, 4, "partial")], 2, "By rows")
    assert "x (6 by 8) all of it, y (6 by 4) a partial sum" in alts[0]


def test_latency_and_throughput_says_what_holds_at_each_bar(alts):
    points = [(1, 0.016, 62.0), (32, 0.018, 1800.0), (256, 0.039, 6600.0)]
    bar = 185.2, "arithmetic"
    plots.latency_and_throughput({"1,000 tokens": points}, "Batches", "virtual", [bar], marked=32)
    assert "batch 256 6,600 at 39 ms. Bar at 185 users: arithmetic takes as long as" in alts[0]


def test_cache_steps_processes_the_prompt_at_once_and_then_one_letter_at_a_time(alts):
    plots.cache_steps("The va", "lue")
    assert "takes the 6 letters of 'The va'" in alts[0] and "each of 2 decoding passes" in alts[0]
    assert "next letters are l, u, e" in alts[0]


def test_memory_of_servers_lists_what_each_needs_and_may_use(alts):
    gib = 2**30
    plots.memory_of_servers({"70B on 2": {"16 bits": (66 * gib, 62 * gib)}}, 72 * gib, "Room?")
    assert "72 GiB of which may be used. 70B on 2, 16 bits: 128 GiB" in alts[0]


def test_predicted_and_published_lists_both_speeds(alts):
    plots.predicted_and_published({"70B": {"128 in": (5300.0, 6378.0)}})
    assert "70B: 5,300 against 6,378" in alts[0]


def test_launches_says_how_long_the_last_drawn_kernel_waits(alts):
    def span(cat, ts, number):
        return {"ph": "X", "cat": cat, "ts": ts, "dur": 5.0, "args": {"correlation": number}}

    events = [span("cuda_runtime", 5.0 * k, k) for k in range(3)]
    events += [span("kernel", 5.0 + 100.0 * k, k) for k in range(3)]
    plots.launches({"large": events}, 2)
    assert "large: kernel 2 starts 95 µs after its launch" in alts[0]


def test_before_and_after_marks_undefined_results(drawn):
    starts = [torch.tensor([1, 2]), torch.tensor([10, 20])]
    results = [torch.tensor([11, 22]), torch.tensor([10, 20])]
    held = {"reduce": list(zip(starts, results, strict=True))}
    plots.before_and_after(held, "All to one", undefined={"reduce": (1,)})
    assert drawn[0].count("undefined") == 1 and "nothing" not in drawn[0]
    plots.before_and_after({"gather": [(starts[0], results[0]), (starts[1], None)]}, "All to one")
    assert drawn[1].count("nothing") == 1 and "undefined" not in drawn[1]


def test_interrupted_says_where_the_run_was_killed(alts):
    run = [(2, 0.5), (2, 0.8), (2, 0.9)]
    plots.interrupted(run, run, stopped_after=2, lost=0.25)
    assert "has 80.0% at its checkpoint after 2 epochs, is killed 0.2 epochs later" in alts[0]
