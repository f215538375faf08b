"""Lesson 13's explorer, which runs a layer in virtual time for each degree, link and width."""

import pytest

from helpers.widgets import tensor_parallel
from helpers.widgets.tensor_parallel import layer_explorer, layer_on, split_table
from vgpu import Timeline


def timeline(makespan_s):
    made = Timeline("H100", [])
    made.makespan_s = makespan_s
    return made


@pytest.mark.parametrize(
    ("degree", "place", "asked"),
    [
        (8, "NVLink 4", (8192, 8, 1, "NVLink 4")),
        (16, "NVLink 4", (8192, 16, 2, "NVLink 4")),
        (4, "PCIe 5", (8192, 4, 1, "PCIe 5")),
        (8, "InfiniBand NDR, one GPU per host", (8192, 8, 8, "NVLink 4")),
        (1, "InfiniBand NDR, one GPU per host", (8192, 1, 1, "NVLink 4")),
    ],
)
def test_each_place_determines_the_layers_link_and_hosts(degree, place, asked):
    def layer(width, degree, hosts, link):
        return width, degree, hosts, link

    assert layer_on(layer, 8192, degree, place) == asked


def test_the_table_compares_with_one_gpu():
    table = split_table({"1 GPU": timeline(0.004), "2 GPUs": timeline(0.0025)})
    assert table.rows[1] == ("2 GPUs", "2.5 ms", "0%", "1.60 times as fast")


def test_the_controls_rerun_the_layer_but_one_gpu_only_once(monkeypatch):
    asked, drawn = [], []
    monkeypatch.setattr(
        tensor_parallel.plots, "split_times", lambda timelines, title: drawn.append(title)
    )

    def layer(width, degree, hosts, link):
        asked.append((width, degree, hosts, link))
        return timeline(0.01 / degree)

    box = layer_explorer(layer)
    width, degree, place = box.children[0].children
    assert asked == [(8192, 1, 1, "NVLink 4"), (8192, 8, 1, "NVLink 4")]
    degree.value = 16
    place.value = "PCIe 5"
    assert asked[2:] == [(8192, 16, 2, "NVLink 4"), (8192, 16, 2, "PCIe 5")]
    width.value = 1024
    assert len(asked) == 4 and len(drawn) == 3
    assert "too few for 16 GPUs" in box.children[1].outputs[0]["text"]
