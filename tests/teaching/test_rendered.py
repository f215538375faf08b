"""Lessons for the book and the slides: an explorer shows its first picture where nothing is live."""

import nbformat

from teaching import rendered

EXPLORER = """
import ipywidgets
from IPython.display import HTML, display
from helpers.widgets.live import live

number = ipywidgets.IntSlider(3)
shown = live(lambda number: display(HTML(f"<img alt='a bar {number} high'>")), {"number": number})
ipywidgets.VBox([number, ipywidgets.HBox([shown])])
"""


def test_an_explorer_leaves_its_first_picture(tmp_path):
    bar = "from tqdm.notebook import tqdm\nfor _ in tqdm(range(2)): pass"
    cells = [nbformat.v4.new_code_cell(source) for source in (EXPLORER, bar)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    path = tmp_path / "99_explorer.ipynb"
    nbformat.write(notebook, path)
    ran = rendered.run(path, tmp_path / "cache")
    picture, sentence = ran.cells[0].outputs
    assert picture.data["text/html"] == "<img alt='a bar 3 high'>"
    assert sentence.data["text/markdown"] == rendered.LIVE_ONLY
    assert ran.cells[1].outputs == [], "a progress bar is no explorer"
    assert "widgets" not in ran.metadata
    nbformat.validate(ran)
