"""Lessons show lines of train.py exactly as in the file, and parse its output.

Lessons 07 and 12 to 15 run it with ``run_line`` and read its losses; in lesson 14, one run fails.
"""

import pytest

from helpers import script
from teaching import lessons

FOLDER = lessons.ROOT / "notebooks"


@pytest.fixture(autouse=True)
def in_the_lessons_folder(monkeypatch):
    monkeypatch.chdir(FOLDER)


def test_show_lines_returns_the_lines_of_the_file():
    shown = script.show_lines("divide", "TENSOR_PLAN", "Checkpoints.save").data
    text = (FOLDER / "train.py").read_text(encoding="utf-8")
    function = shown.split("\n\n\n")[0].split("\n", 2)[2]
    assert function.startswith("def divide(") and function in text
    first, last = map(int, shown.split("\n")[1].removeprefix("# train.py, lines ").split(" to "))
    assert text.splitlines()[first - 1 : last] == function.splitlines()
    assert "# plan/parallel_model.py, lines" in shown and "# helpers/checkpoints.py, lines" in shown
    assert "self.writing = dcp.async_save" in shown


def test_show_lines_finds_a_functions_statement_by_how_it_starts():
    parts = script.show_lines("train: if step % 10", "train: if step % options").data.split(
        "\n\n\n"
    )
    first, second = (part.removeprefix("```python\n").split("\n") for part in parts)
    assert first[1].startswith("if step % 10 == 0") and "    dist.all_reduce(loss)" in first
    assert second[1] == "if step % options.save_every == 0 or ends:"
    assert second[2] == "    checkpoints.save(step)"
    assert "# helpers/gpt.py, line " in script.show_lines("join: dist.init").data
    with pytest.raises(ValueError, match="does not define 'train: if nothing'"):
        script.show_lines("train: if nothing")


def test_show_lines_rejects_an_unknown_name_and_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"does not define 'dividing'; it has .*divide"):
        script.show_lines("dividing")


def test_printed_step_s_reads_times_in_any_unit():
    assert script.printed_step_s("a step takes 443 ms of virtual time") == pytest.approx(0.443)
    with pytest.raises(ValueError, match="no predicted step time"):
        script.printed_step_s("step 10: loss 4")
