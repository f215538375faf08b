"""The explorer of lesson 15: Llama 70B on 64 GPUs."""

import dataclasses

import pytest

from helpers.widgets import layouts
from helpers.widgets.layouts import GPUS, answer, answer_table, plan_of
from vgpu.plan import predict


@pytest.fixture(autouse=True)
def _nobody_beside(monkeypatch):
    """Each test begins without a process that answers, and ends the one that it has started."""
    monkeypatch.setattr(layouts, "_beside", None)
    yield
    if layouts._beside is not None:
        layouts._beside.end()
    answer.cache_clear()


def test_what_is_left_is_shards():
    plan = plan_of(tensors=4, replicas=2, batch=1, checkpoint="full")
    assert (plan.layout.replicas, plan.layout.shards, plan.layout.tensors) == (2, 8, 4)
    assert plan.layout.ranks == GPUS
    with pytest.raises(ValueError, match="8 tensors × 16 replicas do not divide 64 GPUs"):
        plan_of(8, 16, 1, "full")


def test_the_table_says_what_the_recording_says():
    found = answer(plan_of(1, 1, 1, "full"))
    few = found.steps[0]
    assert few.seconds == predict(few.plan).seconds
    table = answer_table(found, "InfiniBand NDR")
    assert table.rows[0] == ("tokens/s a GPU", f"{found.tokens_per_s():,.0f}")
    assert table.rows[2][1].endswith("of 80 GiB: fits")
    slow = answer_table(found, "Ethernet 100")
    assert float(slow.rows[0][1]) < 0.5 * float(table.rows[0][1])
    assert answer(plan_of(1, 1, 1, "full")) is found


def test_the_explorer_shows_what_is_chosen(monkeypatch):
    shown = []
    monkeypatch.setattr(layouts, "show_layout", lambda **chosen: shown.append(chosen))
    box = layouts.layout_explorer()
    tensors, network = box.children[0].children[0], box.children[1].children[1]
    tensors.value = 2
    network.value = "Ethernet 100"
    assert [each["tensors"] for each in shown] == [8, 2, 2]
    assert shown[-1] == {
        "tensors": 2, "replicas": 1, "batch": 8, "checkpoint": "full", "network": "Ethernet 100",
    }  # fmt: skip


def test_bytes_and_the_step_are_drawn_and_a_wrong_layout_is_explained(capsys, monkeypatch):
    drawn, tables = [], []
    monkeypatch.setattr(layouts, "display", tables.append)
    monkeypatch.setattr(layouts.plots, "held_by_cause", lambda held, **_: drawn.append(held))
    monkeypatch.setattr(layouts.plots, "timeline", lambda record, *_, **__: drawn.append(record))
    layouts.show_layout(1, 1, 1, "full")
    held, played = drawn
    assert held["64 shards"] == answer(plan_of(1, 1, 1, "full")).bytes_by_cause
    assert played.makespan_s == answer(plan_of(1, 1, 1, "full")).steps[0].seconds
    layouts.show_layout(1, 3, 1, "full")
    assert "No such layout: 1 tensors × 3 replicas do not divide 64" in capsys.readouterr().out
    assert len(tables) == 1


def test_once_the_explorer_is_there_answers_come_from_beside(monkeypatch):
    asked = []
    monkeypatch.setattr(layouts, "show_layout", lambda **_: None)
    monkeypatch.setattr(layouts.Ready, "answer", lambda self, plan: asked.append(plan))
    layouts.layout_explorer()
    plan = plan_of(2, 1, 1, "full")
    answer(plan)
    assert asked == [plan]
    small = dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=5, width=512))
    assert answer(small).plan is small  # for which there is nobody beside
    assert asked == [plan]
