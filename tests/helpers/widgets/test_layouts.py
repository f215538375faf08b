"""Lesson 15's explorer: Llama 70B on 64 GPUs."""

import pytest

from helpers.widgets import layouts
from helpers.widgets.layouts import GPUS, answer, answer_table, plan_of
from vgpu.plan import predict


def test_dp_shard_takes_the_remaining_gpus():
    plan = plan_of(tp=4, dp_replicate=2, batch=1, recompute="full")
    assert (plan.layout.dp_replicate, plan.layout.dp_shard, plan.layout.tp) == (2, 8, 4)
    assert plan.layout.ranks == GPUS
    with pytest.raises(ValueError, match="tp 8 × dp_replicate 16 does not divide 64 GPUs"):
        plan_of(8, 16, 1, "full")


def test_the_table_shows_the_predicted_speed_and_memory():
    found = answer(plan_of(1, 1, 1, "full"))
    few = found.steps[0]
    assert few.seconds == predict(few.plan).seconds
    table = answer_table(found, "InfiniBand NDR")
    assert table.rows[0] == ("tokens/s per GPU", f"{found.tokens_per_s():,.0f}")
    assert table.rows[2][1].endswith("of 80 GiB: fits")
    slow = answer_table(found, "Ethernet 100")
    assert float(slow.rows[0][1]) < 0.5 * float(table.rows[0][1])
    assert answer(plan_of(1, 1, 1, "full")) is found


def test_the_explorer_shows_the_chosen_layout(monkeypatch):
    shown = []
    monkeypatch.setattr(layouts, "show_layout", lambda **chosen: shown.append(chosen))
    box = layouts.layout_explorer()
    tp, network = box.children[0].children[0], box.children[1].children[1]
    tp.value = 2
    network.value = "Ethernet 100"
    assert [each["tp"] for each in shown] == [8, 2, 2]
    assert shown[-1] == {
        "tp": 2, "dp_replicate": 1, "batch": 8, "recompute": "full", "network": "Ethernet 100",
    }  # fmt: skip


def test_memory_and_the_step_are_drawn_and_an_invalid_layout_is_explained(capsys, monkeypatch):
    drawn, tables = [], []
    monkeypatch.setattr(layouts, "display", tables.append)
    monkeypatch.setattr(layouts.plots, "held_by_cause", lambda held, **_: drawn.append(held))
    monkeypatch.setattr(layouts.plots, "timeline", lambda record, *_, **__: drawn.append(record))
    layouts.show_layout(1, 1, 1, "full")
    held, timeline = drawn
    assert held["dp_shard 64"] == answer(plan_of(1, 1, 1, "full")).bytes_by_cause
    assert timeline.makespan_s == answer(plan_of(1, 1, 1, "full")).steps[0].seconds
    layouts.show_layout(1, 3, 1, "full")
    assert "No such layout: tp 1 × dp_replicate 3 does not divide 64" in capsys.readouterr().out
    assert len(tables) == 1
