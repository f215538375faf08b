"""Figures of lesson 15, by the text that says what is on them."""

import pytest

from helpers import plots
from helpers.plots import style


@pytest.fixture
def alts(monkeypatch):
    found = []
    monkeypatch.setattr(style, "display", lambda picture: found.append(picture.alt))
    return found


def test_more_gpus_with_the_same_batch(alts):
    speeds = {"fast": {2: 1.0, 4: 1.9, 8: 3.0}, "slow": {2: 1.0, 4: 1.2, 8: 1.1}}
    plots.same_batch(speeds, {2: 400, 4: 200, 8: 100})
    assert "fast: 1.00 on 2 GPUs, 3.00 on 8; slow: 1.00 on 2 GPUs, 1.10 on 8." in alts[0]


def test_goodput_says_where_it_is_highest(alts):
    points = {60.0: (0.5, 0.52), 600.0: (0.9, 0.91), 6000.0: (0.25, 0.2)}
    plots.goodput({512: points}, {512: 500.0})
    assert "with 512 GPUs it is highest near 8 min 20 s, at 90%, and 25% at the longest" in alts[0]


def test_losses_by_batch_are_means_over_seeds(alts):
    plots.by_batch({("same", 16): [0.1, 0.3], ("same", 64): [1.0, 2.0], ("more", 64): [0.2, 0.2]})
    assert "batch 16, rate same: 0.20; batch 64, rate same: 1.50" in alts[0]


def test_latency_and_bandwidth(alts):
    plots.latency_and_bandwidth(
        {16: 1e-4, 1024: 1.1e-4, 2**20: 2e-3}, dict.fromkeys((16, 1024, 2**20), 1e-4)
    )
    assert "16 B 100 µs, 1 MiB 2 ms" in alts[0]


def test_bytes_add_up_beside_the_memory(alts):
    held = {"parameters": 2**30, "optimizer state": 2 * 2**30}
    plots.held_by_cause({"4 shards": held}, 80 * 2**30, unit="GiB")
    assert alts == ["Bars of the bytes on each GPU, by cause. 4 shards 3.0 GiB. A GPU has 80 GiB."]
