"""Every exercise: the stub is not attempted, typical wrong answers fail, the solution passes."""

import importlib
import linecache
import re

import pytest

import lessons
from helpers.checks import evaluate, exercises

EXERCISES = [
    (path, exercise_id) for path in lessons.NOTEBOOKS for exercise_id in lessons.exercise_ids(path)
]
each_exercise = pytest.mark.parametrize(
    ("path", "exercise_id"), EXERCISES, ids=[exercise_id for _, exercise_id in EXERCISES]
)


def wrong_answers(exercise_id):
    """The typical mistakes for an exercise: pairs of code and a phrase of the hint it must get."""
    lesson = int(exercise_id.split(".")[0])
    return importlib.import_module(f"wrong_answers.lesson_{lesson:02d}").WRONG[exercise_id]


def run_cell(source, namespace, name):
    """Run a cell's code as a notebook would, with its lines known to tracebacks."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)


def outcome_of(path, exercise_id, source):
    """Run the setup, then the answer's code, then ask for a verdict as the check cell does."""
    namespace = {"__name__": "__main__"}
    for cell in (*lessons.tagged(path, "setup"), *lessons.tagged(path, f"given-{exercise_id}")):
        run_cell(cell.source, namespace, cell.id)
    run_cell(source, namespace, f"exercise {exercise_id}")
    (cell,) = lessons.tagged(path, f"check-{exercise_id}")
    answer = re.search(rf'check\("{re.escape(exercise_id)}",\s*(.*)\)\s*$', cell.source, re.DOTALL)
    return evaluate(exercise_id, eval(answer[1], namespace))


@each_exercise
def test_the_stub_alone_is_not_attempted(path, exercise_id):
    (stub,) = lessons.tagged(path, f"stub-{exercise_id}")
    assert outcome_of(path, exercise_id, stub.source).status == "not attempted"


@each_exercise
def test_the_folded_solution_passes(path, exercise_id):
    outcome = outcome_of(path, exercise_id, lessons.solution(path, exercise_id))
    assert outcome.status == "right", str(outcome)


@each_exercise
def test_typical_wrong_answers_fail_with_their_hint(path, exercise_id):
    wrong = wrong_answers(exercise_id)
    assert wrong
    for source, phrase in wrong:
        outcome = outcome_of(path, exercise_id, source)
        assert outcome.status == "wrong", f"passed as {outcome.status}:\n{source}"
        assert phrase in str(outcome), f"{phrase!r} is not in:\n{outcome}"


def test_lessons_and_checks_name_the_same_exercises():
    assert [item.id for item in exercises()] == [exercise_id for _, exercise_id in EXERCISES]
