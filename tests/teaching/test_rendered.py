"""Lessons for the book and the slides: without a kernel, an explorer shows its first picture."""

import nbformat

from teaching import rendered
from teaching.answers import ANSWERS

EXPLORER = """
import ipywidgets
from IPython.display import HTML, display
from helpers.widgets.live import live

number = ipywidgets.IntSlider(3)
shown = live(lambda number: display(HTML(f"<img alt='a bar {number} high'>")), {"number": number})
ipywidgets.VBox([number, ipywidgets.HBox([shown])])
"""

ASKED = """
import ipywidgets
from helpers.widgets.live import live

def number_explorer():
    number = ipywidgets.IntSlider(3, min=2, max=3, description="number")
    shown = live(lambda number: print(factor * number), {"number": number})
    return ipywidgets.VBox([number, shown])

factor = 10
number_explorer()
"""


def test_an_explorer_is_replaced_by_its_first_picture(tmp_path):
    bar = "from tqdm.notebook import tqdm\nfor _ in tqdm(range(2)): pass"
    cells = [nbformat.v4.new_code_cell(source) for source in (EXPLORER, bar)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    path = tmp_path / "99_explorer.ipynb"
    nbformat.write(notebook, path)
    ran = rendered.run(path, tmp_path / "cache")
    picture, sentence = ran.cells[0].outputs
    assert picture.data["text/html"] == "<img alt='a bar 3 high'>"
    assert sentence.data["text/markdown"] == rendered.LIVE_ONLY
    assert ran.cells[1].outputs == [], "a progress bar must not count as an explorer"
    assert "widgets" not in ran.metadata
    nbformat.validate(ran)


def test_an_explorers_answers_are_computed_in_the_state_after_its_cell(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (ASKED, "factor = 1000")]
    path = tmp_path / "99_explorer.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    ran = rendered.run(path, tmp_path / "cache")
    assert [cell.source for cell in ran.cells] == [cell.source for cell in cells]
    look, note = ran.cells[0].outputs
    (found,) = note.data[ANSWERS]
    assert look.text == "30\n" and note.data["text/markdown"] == rendered.LIVE_ONLY
    assert [part["text"] for part in found["parts"]] == ["20\n", "30\n"]
    assert found["answers"] == [[0], [1]] and found["controls"][0]["now"] == 1
    nbformat.validate(ran)
