"""The explorers' live output: it follows its controls and hides no errors."""

import base64
import math

import ipywidgets
import nbformat
import pytest
from nbclient import NotebookClient

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
from helpers.widgets.live import FEW_VALUES, answers, live, offered

LESSON = """
%matplotlib inline
import ipywidgets, matplotlib.pyplot as plt
from IPython.display import HTML, display
from helpers.widgets.live import live

def draw(height):
    plt.plot([0, height])
    plt.show()
    display(HTML(f"<b>{height}</b>"))
    print("height", height)

height = ipywidgets.IntSlider(3)
shown = live(draw, {"height": height})
height.value = 4
[(output["output_type"], *output.get("data", ())) for output in shown.outputs], shown.outputs
"""


def test_live_follows_its_controls():
    number = ipywidgets.IntSlider(2)
    word = ipywidgets.Text("a")
    shown = live(lambda number, word: print(word * number), {"number": number, "word": word})
    assert shown.outputs == ({"output_type": "stream", "name": "stdout", "text": "aa\n"},)
    number.value = 3
    word.value = "b"
    assert [output["text"] for output in shown.outputs] == ["bbb\n"]


def test_an_error_is_shown_after_the_printed_output_and_the_next_change_works():
    def inverse(number):
        print("of", number)
        print(1 / number)

    number = ipywidgets.IntSlider(0)
    shown = live(inverse, {"number": number})
    printed, failed = shown.outputs
    assert printed["text"] == "of 0\n"
    assert failed["output_type"] == "error" and failed["ename"] == "ZeroDivisionError"
    assert "print(1 / number)" in "".join(failed["traceback"])
    number.value = 2
    assert [output["text"] for output in shown.outputs] == ["of 2\n0.5\n"]


def test_live_captures_figures_html_and_printed_text_in_a_kernel():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LESSON)])
    NotebookClient(notebook, timeout=100, extra_arguments=["--log-level=ERROR"]).execute()
    (result,) = [o for o in notebook.cells[0].outputs if o.output_type == "execute_result"]
    kinds, outputs = eval(result.data["text/plain"])
    assert [kind[0] for kind in kinds] == ["display_data", "display_data", "stream"]
    assert base64.b64decode(outputs[0]["data"]["image/png"]).startswith(b"\x89PNG")
    assert outputs[1]["data"]["text/html"] == "<b>4</b>"
    assert outputs[2]["text"] == "height 4\n"


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
    monkeypatch.setattr(layouts, "live", only_asked)  # layouts imports it by name
    explorer()
    values = offered(*asked[0])
    assert math.prod(map(len, values.values())) == count
    assert all(control.description for control in asked[0][0].values())
