"""The explorers' live output: it follows its controls and hides no errors."""

import base64

import ipywidgets
import nbformat
from nbclient import NotebookClient

from helpers.widgets.live import live

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
