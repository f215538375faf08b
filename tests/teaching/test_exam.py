"""The exam: its stubs, solutions and typical mistakes, its sheet, and how it's judged."""

import ast
import json

import pytest
from levels import ALL
from wrong_answers.exam import WRONG

import vgpu
from helpers.checks import exercises
from teaching import class_check, editions, lessons
from teaching.exam.__main__ import JUDGED_LATER, main
from teaching.judge import outcome_of

TASKS = lessons.exercise_ids(lessons.EXAM)
# Right answers that differ from the solution: pairs of its text and a replacement.
OTHERS = {
    "99.7": [("return max(free_s)", "from numpy import array\n    return array(free_s).max()")],
    "99.8": [("1000, 1500", "460, 12_500")],
    "99.9": [
        (
            "dist.all_reduce(total)",
            "parts = total.new_empty(dist.get_world_size())\n"
            "    dist.all_gather_single(parts, total.reshape(1))\n    total = parts.sum()",
        )
    ],
    "99.10": [(".long()", ".int()")],
}
each_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(autouse=True)
def without_the_notebooks_gpus():
    """Disable the eight GPUs that the exam's setup leaves enabled."""
    yield
    vgpu.disable()


def test_the_exam_has_thirteen_tasks_of_ten_to_fifteen_minutes():
    assert [f"99.{n}" for n in range(1, 14)] == TASKS and WRONG.keys() == {*TASKS}
    for task in TASKS:
        (text,) = lessons.tagged(lessons.EXAM, f"exercise-{task}")
        minutes = int(text.source.partition("**Minutes:** ")[2].partition(" ")[0])
        assert 10 <= minutes <= 15


@each_task
def test_the_unchanged_stub_counts_as_not_attempted(task):
    (stub,) = lessons.tagged(lessons.EXAM, f"stub-{task}")
    assert outcome_of(lessons.EXAM, task, stub.source).status == "not attempted"


@each_task
def test_the_solution_passes_and_shows_what_it_achieved(task):
    solution = lessons.solution(lessons.EXAM, task)
    others = [solution.replace(*pair) for pair in OTHERS.get(task, ())]
    assert solution not in others
    for source in [solution] * (3 if ALL else 1) + others:  # with new random inputs
        outcome = outcome_of(lessons.EXAM, task, source)
        assert outcome.status == "right" and outcome.achieved, f"{source}\n{outcome}"


@pytest.mark.parametrize("task", ["99.2", "99.4", "99.6"])
def test_an_answer_without_a_return_gets_a_hint_but_no_line_number(task):
    (stub,) = lessons.tagged(lessons.EXAM, f"stub-{task}")
    outcome = outcome_of(
        lessons.EXAM, task, stub.source.replace("raise NotImplementedError", "...")
    )
    assert outcome.status == "wrong" and "NoneType" in outcome.error
    assert "of your cell" not in outcome.error and "without a return returns None" in outcome.hint


@each_task
def test_typical_mistakes_fail_with_their_hints(task):
    assert len(WRONG[task]) >= 3
    for source, phrase in WRONG[task]:
        outcome = outcome_of(lessons.EXAM, task, source)
        assert outcome.status == "wrong", f"judged {outcome.status}, not wrong:\n{source}"
        assert phrase in str(outcome), f"{phrase!r} is not in:\n{outcome}"
        assert outcome.yours != outcome.expected or outcome.error, f"both look the same:\n{outcome}"
        assert outcome.given and outcome.hint, f"the input or hint is missing:\n{outcome}"


def test_the_exams_tasks_are_not_in_the_course():
    ids = {item.id for item in exercises()}
    assert ids and not ids & {*TASKS}


@pytest.fixture
def sheet(tmp_path, capsys):
    path = tmp_path / "99_exam.ipynb"
    main([str(path)])
    assert "13 tasks" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="already exists"):
        main([str(path)])
    return path


def test_the_sheet_gives_nothing_away_and_runs_without_the_teachers_tools(sheet):
    text = sheet.read_text("utf-8")
    assert "teaching" not in text and "Solution" not in text and "check(" not in text
    cells = lessons.cells(sheet)
    assert lessons.exercise_ids(sheet) == TASKS
    assert sum(cell.source == JUDGED_LATER for cell in cells) == 13
    names = dict.fromkeys(("__name__",), "__main__")
    (setup,) = lessons.tagged(sheet, "setup")
    exec(setup.source, names)
    for task in TASKS:
        (stub,) = lessons.tagged(sheet, f"stub-{task}")
        ast.parse(stub.source)


def test_the_student_edition_has_no_exam(tmp_path):
    editions.write("student", tmp_path / "student")
    names = [path.name for path in (tmp_path / "student").rglob("*")]
    assert "99_exam.ipynb" not in names and "exam" not in names


def test_exam_sheets_of_a_class_are_judged_like_lessons(sheet, tmp_path):
    notebook = json.loads(sheet.read_text("utf-8"))
    for cell in notebook["cells"]:
        if "stub-99.6" in cell["metadata"].get("tags", ()):
            cell["source"] = lessons.solution(lessons.EXAM, "99.6")
        if "stub-99.2" in cell["metadata"].get("tags", ()):
            cell["source"] = WRONG["99.2"][0][0]
    folder = tmp_path / "handed_in" / "ada"
    folder.mkdir(parents=True)
    (folder / "99_exam.ipynb").write_text(json.dumps(notebook), "utf-8")
    verdicts = class_check.check_class(folder.parent, class_check.Limits())
    found = {verdict.exercise: verdict.status for verdict in verdicts}
    assert found == dict.fromkeys(TASKS, "not attempted") | {"99.6": "right", "99.2": "wrong"}
    assert class_check.table(verdicts).splitlines()[1].split()[-1] == "1"
