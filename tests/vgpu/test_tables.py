"""A table reads the same as text and as HTML, and escapes what it shows."""

import pytest

from vgpu.tables import Table


def test_a_table_as_text_is_aligned_and_says_yes_and_no():
    table = Table(("name", "ok"), [("a", True), ("longer", False)], caption="two rows")
    assert str(table).splitlines() == ["two rows", "name    ok", "a       yes", "longer  no"]


def test_a_table_as_html_escapes_text_and_keeps_links():
    table = Table(("x",), [("<b>",), ("home",)], links={"home": "a'b.ipynb"})
    shown = table._repr_html_()
    assert "&lt;b&gt;" in shown and "<b>" not in shown
    assert "<a href='a&#x27;b.ipynb'>home</a>" in shown


def test_a_table_as_html_shows_backticks_as_code_and_keeps_widths():
    table = Table(("x", "y"), [("`a < b` holds", "")], widths={"x": "20%"})
    shown = table._repr_html_()
    assert ">a &lt; b</code> holds" in shown and "`" not in shown
    assert shown.count("width:20%") == 1
    assert "`a < b` holds" in str(table)


def test_a_row_that_does_not_fit_is_rejected():
    with pytest.raises(ValueError, match="a row has 1 cells, but the header has 2"):
        Table(("a", "b"), [("only",)])
