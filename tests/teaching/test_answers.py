"""Explorers' answers for a page without a kernel: which values are offered, and what they show."""

import math

import ipywidgets
import pytest

import helpers.widgets.live
from helpers.widgets import (
    checkpointing,
    layouts,
    mesh,
    pipeline,
    serving,
    sharding,
    tensor_parallel,
)
from teaching.answers import FEW_VALUES, answers, offered


def _controls():
    return {
        "number": ipywidgets.IntSlider(7, min=1, max=40, description="number"),
        "word": ipywidgets.Dropdown(options=[("one", "a"), ("two", "b")], description="word"),
    }


def test_answers_are_computed_for_every_combination_of_values():
    found = answers(lambda number, word: print(word * (number // 20)), _controls(), {})
    number, word = found["controls"]
    assert number["label"] == "number" and number["slider"] and not word["slider"]
    assert word["values"] == ["one", "two"] and number["values"][number["now"]] == "7"
    texts = ["".join(found["parts"][part]["text"] for part in each) for each in found["answers"]]
    assert texts == [w * (int(n) // 20) + "\n" for n in number["values"] for w in ("a", "b")]
    assert len(found["parts"]) == len(set(texts)) < len(texts), (
        "identical outputs must be stored once"
    )


def test_a_page_offers_a_few_values_including_the_ends_and_the_current_one():
    values = [value for _, value in offered(_controls(), {})["number"]]
    assert len(values) == FEW_VALUES and values == sorted(values)
    assert {1, 7, 40} <= set(values)
    named = offered(_controls(), {"number": (40, 7)})
    assert named == {"number": [("7", 7), ("40", 40)], "word": [("one", "a"), ("two", "b")]}


@pytest.mark.parametrize(
    ("few", "message"),
    [
        ({"number": (7, 41)}, r"'number' has no \[41\]"),
        ({"word": ("b",)}, r"'word' is set to 'a', which isn't among \['b'\]"),
        ({"number": range(1, 41), "third": range(5)}, "400 combinations of number, word, third"),
    ],
)
def test_offered_rejects_values_that_a_page_cannot_offer(few, message):
    controls = _controls()
    controls["third"] = ipywidgets.IntSlider(0, min=0, max=4)
    with pytest.raises(ValueError, match=message):
        offered(controls, few)


def test_the_error_for_a_failed_answer_names_its_values():
    with pytest.raises(RuntimeError, match=r"'number': 1, 'word': 'a'.*(.|\n)*ZeroDivisionError"):
        answers(lambda number, word: 1 / (number - 1), _controls(), {})


@pytest.mark.parametrize(
    ("explorer", "count"),
    [
        (pipeline.pipeline_explorer, 4 * 2 * 3 * 4),
        (lambda: checkpointing.checkpointing_explorer(None), 3 * 8),
        (sharding.sharding_explorer, 3 * 2 * 4 * 5),
        (lambda: tensor_parallel.layer_explorer(None), 5 * 5 * 3),
        (mesh.mesh_explorer, 3 * 3 * 3 * 2 * 2),
        (layouts.layout_explorer, 3 * 2 * 3 * 2 * 2),
        (serving.serving_explorer, 3 * 5 * 2 * 3),
    ],
    ids=["10", "11", "12", "13", "14", "15", "18"],
)
def test_the_lessons_explorers_offer_only_values_that_a_page_can_show(monkeypatch, explorer, count):
    asked = []

    def only_asked(function, controls, few=None):
        asked.append((controls, few or {}))
        return ipywidgets.Output()

    monkeypatch.setattr(helpers.widgets.live, "live", only_asked)
    explorer()
    values = offered(*asked[0])
    assert math.prod(map(len, values.values())) == count
    assert all(control.description for control in asked[0][0].values())
