"""Lesson 14's explorer: 64 GPUs as a mesh."""

from itertools import permutations

import pytest

from helpers.widgets import mesh
from helpers.widgets.mesh import GPUS, answer, answer_table, mesh_sizes, tokens_per_s
from vgpu.plan.estimate import DIMENSIONS


def test_mesh_sizes_uses_the_remaining_gpus_for_data_parallelism():
    assert mesh_sizes(4, 2, 2) == {"tensor": 4, "context": 2, "pipeline": 2, "data": 4}
    order = ("data", "pipeline", "tensor", "context")
    assert list(mesh_sizes(4, 2, 2, order)) == list(order)


def test_mesh_sizes_rejects_more_gpus_than_there_are():
    with pytest.raises(ValueError, match="8 × 8 × 8 = 512 does not divide 64 GPUs"):
        mesh_sizes(8, 8, 8)


def test_the_table_shows_the_recorded_steps_speed_and_memory():
    found = answer(mesh_sizes(8, 1, 1))
    table = answer_table(found, 64)
    assert [row[0] for row in table.rows] == list(DIMENSIONS)
    assert table.rows[0][1] == "0, 1, 2, 3, …" and table.rows[1][1] == "0"
    assert f"{tokens_per_s(found, 64):.0f} tokens/s per GPU" in table.caption
    assert tokens_per_s(found, 64) * found.seconds * GPUS == pytest.approx(64 * 8192)
    assert "of 80 GiB: fits." in table.caption
    assert "does not fit." in answer_table(answer(mesh_sizes(1, 1, 1)), 64).caption


def test_the_explorer_shows_the_chosen_mesh(monkeypatch):
    shown = []
    monkeypatch.setattr(mesh, "show_mesh", lambda **chosen: shown.append(chosen))
    box = mesh.mesh_explorer()
    tensor, order = box.children[0].children[0], box.children[1].children[0]
    tensor.value = 2
    order.value = ("data", *DIMENSIONS[:3])
    assert [each["tensor"] for each in shown] == [8, 2, 2]
    assert shown[-1]["order"] == ("data", *DIMENSIONS[:3])
    assert {value for _, value in order.options} == set(permutations(DIMENSIONS))


def test_show_mesh_explains_an_impossible_mesh(capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(mesh.plots, "mesh", lambda *given: drawn.append(given))
    mesh.show_mesh(8, 8, 8)
    assert capsys.readouterr().out == "No such mesh: 8 × 8 × 8 = 512 does not divide 64 GPUs.\n"
    mesh.show_mesh(8, 1, 1, sequences=4)
    assert "4 sequences aren't divisible by data = 8" in capsys.readouterr().out
    assert not drawn
    mesh.show_mesh(8, 1, 1)
    assert list(drawn[0][0]) == ["tensor", "data"]
