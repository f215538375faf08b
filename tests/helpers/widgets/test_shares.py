"""The explorer of lesson 04: real scatter, any batch, any number of GPUs."""

import pytest

import vgpu
from helpers import devices
from helpers.widgets.shares import describe_shares, share_sizes, shares_explorer, show_shares


@pytest.fixture
def gpus():
    yield devices.lab(8)
    vgpu.disable()


def test_shares_add_up_and_shrink(gpus):
    for batch_size in range(1, 40):
        for count in (1, 2, 3, 8):
            sizes = share_sizes(batch_size, gpus[:count])
            assert len(sizes) == count and sum(sizes) == batch_size
            assert sizes == sorted(sizes, reverse=True)


def test_idle_gpus_are_marked(gpus):
    assert share_sizes(10, gpus) == [2, 2, 2, 2, 2, 0, 0, 0]
    assert describe_shares([2, 2, 0]).startswith("4 samples: 2 of 3 GPUs get something, 1 idle")
    assert describe_shares([2, 2]) == "4 samples: 2 of 2 GPUs get something."


def test_an_empty_batch_is_refused(gpus):
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        share_sizes(0, gpus)


def test_the_sliders_redraw(gpus, monkeypatch):
    drawn = []
    monkeypatch.setattr("helpers.plots.share_bars", drawn.append)
    explorer = shares_explorer(gpus)
    batch_size, gpu_count = explorer.children[0].children
    batch_size.value = 33
    gpu_count.value = 4
    assert drawn == [[2, 2, 2, 2, 2, 0, 0, 0], [5, 5, 5, 5, 5, 5, 3, 0], [9, 9, 9, 6]]


def test_the_figure_works_without_the_widget(gpus, capsys):
    show_shares(9, 2, gpus)
    assert "9 samples: 2 of 2 GPUs" in capsys.readouterr().out
