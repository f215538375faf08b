"""Every exercise: the stub counts as not attempted, typical wrong answers fail, the solution passes.

For exercises with a slow check, only the first wrong answer is tried; with ``TESTS=all`` in the
environment, the other wrong answers and alternative right answers are tried as well.
"""

import re

import pytest
from levels import ALL
from right_answers import RIGHT
from wrong_answers import wrong_answers

import vgpu
from helpers.checks import exercises
from teaching import lessons
from teaching.judge import outcome_of

EXERCISES = [
    (path, exercise_id) for path in lessons.NOTEBOOKS for exercise_id in lessons.exercise_ids(path)
]
# Checking an answer to one of these starts ranks or measures networks, which is slow.
LONG = (
    *("6.1", "6.2", "6.4", "6.5", "7.1", "7.2", "7.4", "8.3", "9.2", "11.2", "12.1", "12.4"),
    *("13.1", "13.2", "13.3", "13.4", "13.5"),
)
# Right answers so close to a check's limit that some of its random inputs once crossed it.
CLOSE_TO_A_BORDER = {
    "12.3": (
        "def tokens_to_hide(gpus, flop_per_s, bytes_per_s):\n"
        "    import math\n"
        "    return math.ceil((gpus - 1) / gpus * flop_per_s / bytes_per_s)"
    ),
    "14.3": (
        "def attend(query, blocks):\n"
        "    best, total, output = None, 0, 0\n"
        "    for number, (keys, values) in enumerate(blocks):\n"
        "        scores = torch.einsum('bhsd,bhcd->bhsc', query, keys) / query.size(-1) ** 0.5\n"
        "        new = scores.max(-1, keepdim=True).values\n"
        "        new = new if best is None else torch.maximum(new, best)\n"
        "        shrink = 0 if best is None else (best - new).exp()\n"
        "        weights = (scores - new).exp()\n"
        "        total = total * shrink + weights.sum(-1, keepdim=True)\n"
        "        output = output * shrink + weights @ values\n"
        "        best = new\n"
        "    return output / total"
    ),
    "14.5": (
        "def within_capacity(chosen, experts, capacity):\n"
        "    kept = torch.zeros_like(chosen, dtype=torch.bool)\n"
        "    for expert in range(experts):\n"
        "        sent = chosen == expert\n"
        "        kept |= sent & (sent.cumsum(0) <= capacity)\n"
        "    return kept"
    ),
}
each_exercise = pytest.mark.parametrize(
    ("path", "exercise_id"), EXERCISES, ids=[exercise_id for _, exercise_id in EXERCISES]
)


@pytest.fixture(autouse=True)
def _lab_is_closed():
    yield
    if vgpu.is_enabled():
        vgpu.disable()  # a lesson's setup calls devices.lab, which leaves its GPUs enabled


@each_exercise
def test_the_unchanged_stub_counts_as_not_attempted(path, exercise_id):
    (stub,) = lessons.tagged(path, f"stub-{exercise_id}")
    assert outcome_of(path, exercise_id, stub.source).status == "not attempted"


@each_exercise
def test_the_folded_solution_passes(path, exercise_id):
    outcome = outcome_of(path, exercise_id, lessons.solution(path, exercise_id))
    assert outcome.status == "right", str(outcome)
    assert outcome.achieved, "the verdict on a right answer must show what the answer achieved"


@pytest.mark.parametrize("exercise_id", [each for each in RIGHT if ALL or each not in LONG])
def test_right_answers_that_differ_from_the_solution_pass(exercise_id):
    (path,) = (path for path, each in EXERCISES if each == exercise_id)
    for source in RIGHT[exercise_id]:
        outcome = outcome_of(path, exercise_id, source)
        assert outcome.status == "right", f"{source}\n{outcome}"


@pytest.mark.parametrize("exercise_id", CLOSE_TO_A_BORDER)
def test_a_right_answer_close_to_a_limit_passes_for_all_random_inputs(exercise_id):
    (path,) = (path for path, each in EXERCISES if each == exercise_id)
    for _ in range(5):
        outcome = outcome_of(path, exercise_id, CLOSE_TO_A_BORDER[exercise_id])
        assert outcome.status == "right", str(outcome)


@each_exercise
def test_typical_wrong_answers_fail_with_their_hint(path, exercise_id):
    wrong = wrong_answers(exercise_id)
    assert wrong
    for source, phrase in wrong if ALL or exercise_id not in LONG else wrong[:1]:
        outcome = outcome_of(path, exercise_id, source)
        assert outcome.status == "wrong", f"judged {outcome.status}, not wrong:\n{source}"
        pattern = re.compile(re.escape(phrase)) if isinstance(phrase, str) else phrase
        assert pattern.search(str(outcome)), f"{phrase!r} is not in:\n{outcome}"
        assert outcome.yours != outcome.expected or outcome.error, f"both look the same:\n{outcome}"
        assert outcome.given and outcome.hint, f"the input or hint is missing:\n{outcome}"


def test_lessons_and_checks_have_the_same_exercises():
    ids = [exercise_id for _, exercise_id in EXERCISES]
    assert [item.id for item in exercises()] == ids
    assert set(LONG) <= set(ids)


def test_a_checks_title_matches_its_exercises_heading():
    for item, (path, exercise_id) in zip(exercises(), EXERCISES, strict=True):
        (text,) = lessons.tagged(path, f"exercise-{exercise_id}")
        assert f"### Exercise {exercise_id} · {item.title}\n" in text.source
