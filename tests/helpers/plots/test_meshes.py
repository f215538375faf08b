"""Figures of lesson 14, by the text that says what is on them."""

import pytest

from helpers import plots
from helpers.plots import style
from vgpu.plan import meshes


@pytest.fixture
def pictures(monkeypatch):
    found = []
    monkeypatch.setattr(style, "display", found.append)
    return found


def test_a_mesh_names_its_groups(pictures):
    sizes = {"inside": 4, "across": 2}
    plots.mesh({name: meshes.groups(sizes, name) for name in sizes}, gpus_per_host=4)
    (picture,) = pictures
    assert "inside, 2 groups of 4, the first one ranks 0, 1, 2, 3" in picture.alt
    assert "across, 4 groups of 2, the first one ranks 0, 4" in picture.alt


def test_a_ring_s_work_says_who_computes_what(pictures):
    plots.ring_work({"in order": [[3, 0], [3, 4]], "both ends": [[3, 2], [3, 2]]}, "products")
    assert "in order: rank 0 [3, 0], rank 1 [3, 4]; both ends: rank 0 [3, 2]" in pictures[0].alt


def test_full_experts(pictures):
    plots.expert_load([10, 2, 4, 0], experts_per_rank=2, capacity=5)
    assert "expert 0 10, expert 1 2" in pictures[0].alt
    assert "the mean is 4, the capacity 5" in pictures[0].alt
