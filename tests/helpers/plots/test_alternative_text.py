"""Every figure has alternative text, in JupyterLab, in exported HTML and on the site."""

import ast
import re

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter

from helpers.plots import style
from teaching import lessons

matplotlib.use("Agg")

PLOTS = sorted((lessons.ROOT / "helpers" / "plots").rglob("[a-z]*.py"))


def shown(draw, monkeypatch):
    """Return what a drawing function displays."""
    pictures = []
    monkeypatch.setattr(style, "display", pictures.append)
    draw()
    return pictures


def test_show_displays_the_figure_with_its_alternative_text_and_closes_it(monkeypatch):
    before = plt.get_fignums()
    alt = 'Bars: "a" is twice as high as b <and c>.'
    (picture,) = shown(lambda: style.show(style.figure()[0], alt), monkeypatch)
    assert plt.get_fignums() == before
    assert repr(picture) == f"[Figure: {alt}]"
    output = nbformat.v4.new_output(
        "display_data",
        data={"text/html": picture._repr_html_(), "image/png": picture._repr_png_()},
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (image,) = BeautifulSoup(page, "html.parser").find_all("img")
    assert image["alt"] == alt and image["src"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("alt", ["", "A figure", "Loss over epochs"])
def test_show_rejects_a_label_as_alternative_text(alt):
    made, _ = style.figure()
    with pytest.raises(AssertionError, match="in a sentence"):
        style.show(made, alt)
    plt.close(made)


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.stem)
def test_plots_show_figures_only_through_style_show(path):
    bare = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "plt.show"
    ]
    assert not bare, f"{path.name} calls plt.show on lines {bare}: use style.show"


@pytest.mark.parametrize("path", lessons.NOTEBOOKS, ids=lambda path: path.stem)
def test_lessons_show_their_own_figures_with_alternative_text(path):
    for cell in lessons.cells(path):
        if cell.is_code:
            assert not re.search(r"\bplt\.|imshow\(|savefig\(", cell.source), (
                f"{cell.id} uses pyplot: use plots.figure and plots.show(figure, alt=...)"
            )
            drawn = len(re.findall(r"\bplots\.figure\(", cell.source))
            assert len(re.findall(r"\bplots\.show\(", cell.source)) == drawn, cell.id
