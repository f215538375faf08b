"""Lessons show lines of train.py as they stand in the file, and run it."""

import pytest

from helpers import script
from teaching import lessons

FOLDER = lessons.ROOT / "notebooks"


@pytest.fixture(autouse=True)
def in_the_lessons_folder(monkeypatch):
    monkeypatch.chdir(FOLDER)


def test_show_lines_gives_the_lines_of_the_file():
    shown = script.show_lines("divide", "TENSOR_PLAN", "Checkpoints.save").data
    text = (FOLDER / "train.py").read_text(encoding="utf-8")
    function = shown.split("\n\n\n")[0].split("\n", 2)[2]
    assert function.startswith("def divide(") and function in text
    first, last = map(int, shown.split("\n")[1].removeprefix("# train.py, lines ").split(" to "))
    assert text.splitlines()[first - 1 : last] == function.splitlines()
    assert "# gpt.py, lines" in shown and "# checkpoints.py, lines" in shown
    assert "self.writing = dcp.async_save" in shown


def test_show_lines_refuses_an_unknown_name_and_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"does not define 'dividing'; it has .*divide"):
        script.show_lines("dividing")


def test_run_line_starts_the_script_and_printed_losses_reads_its_output(capsys):
    output = script.run_line("python -m vgpu train.py --steps 10 --batch 4")
    assert capsys.readouterr().out.startswith(
        "$ python -m vgpu train.py --steps 10 --batch 4\nstep 10"
    )
    assert list(script.printed_losses(output)) == [10]


def test_run_line_raises_what_a_failing_script_wrote():
    with pytest.raises(RuntimeError, match=r"status 2:\n.*1 ranks are not dp_replicate 1"):
        script.run_line("python -m vgpu train.py --tp 2")


def test_printed_step_s_reads_seconds_in_any_unit():
    assert script.printed_step_s("a step takes 443 ms of virtual time") == pytest.approx(0.443)
    with pytest.raises(ValueError, match="no step was predicted"):
        script.printed_step_s("step 10: loss 4")
