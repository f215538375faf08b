"""How exercises are checked: verdicts, the learner's line in errors, and progress."""

import linecache
from pathlib import Path

import pytest
import torch

from helpers.checks import blame, check, core, evaluate, exercises, progress, records, reset
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path / "progress"))


@pytest.fixture
def doubled(monkeypatch):
    """Two exercises that exist only during one test: double a random tensor, and double ones."""
    # Import all exercises now: any first imported during this test would be forgotten afterward.
    monkeypatch.setattr(core, "_exercises", {item.id: item for item in exercises()})
    # The course's checks are in its packages; these are here, but aren't learners' code, either.
    monkeypatch.setattr(blame, "_COURSE", (*blame._COURSE, Path(__file__).parent))

    @exercise("99.1", "double it")
    def checker(answer):
        given = torch.randn(3)
        expect_close(answer(given), given * 2, given=given, hint="twice, not squared")

    @exercise("99.2", "double ones")
    def double_ones(answer):
        with for_input("ones", hint="look at the sizes"):
            expect_close(answer(torch.ones(3)), torch.full((3,), 2.0))


def learner(source):
    """Return the function ``answer``, defined as in a notebook cell."""
    filename = "<a cell of the learner's>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"torch": torch}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["answer"]


@pytest.mark.usefixtures("doubled")
class TestVerdicts:
    def test_a_right_answer_is_judged_right(self):
        assert evaluate("99.1", lambda x: x + x).status == "right"

    def test_a_wrong_answer_is_shown_with_the_expected_result_the_input_and_a_hint(self):
        outcome = evaluate("99.1", lambda x: x**2)
        assert outcome.status == "wrong"
        assert outcome.yours and outcome.expected and outcome.given
        assert outcome.hint == "twice, not squared"
        assert "yours" in str(outcome) and "twice, not squared" in outcome._repr_html_()

    @pytest.mark.parametrize("answer", [..., (1, ...), {"a": ...}])
    def test_an_ellipsis_counts_as_not_attempted(self, answer):
        assert evaluate("99.1", answer).status == "not attempted"

    @pytest.mark.parametrize("begun", ["", "    y = x\n"])
    @pytest.mark.parametrize("exercise_id", ["99.1", "99.2"])
    def test_a_bare_not_implemented_error_counts_as_not_attempted(self, exercise_id, begun):
        answer = learner(f"def answer(x):\n{begun}    raise NotImplementedError\n")
        assert evaluate(exercise_id, answer).status == "not attempted"

    def test_a_stub_is_not_called(self):
        answer = learner('def answer():\n    """What to do."""\n    raise NotImplementedError\n')
        assert evaluate("99.1", answer).status == "not attempted"

    def test_a_not_implemented_error_with_a_message_counts_as_wrong(self):
        answer = learner("def answer(x):\n    raise NotImplementedError('could not run')\n")
        assert evaluate("99.1", answer).status == "wrong"

    def test_an_error_names_the_learners_line(self):
        answer = learner("def answer(x):\n    y = x + 1\n    return y @ torch.ones(7)\n")
        outcome = evaluate("99.1", answer)
        assert outcome.status == "wrong"
        assert "RuntimeError" in outcome.error
        assert "line 3 of your cell: return y @ torch.ones(7)" in outcome.error

    def test_an_error_inside_a_library_still_names_the_learners_line(self):
        answer = learner("def answer(x):\n    return torch.nn.Linear(5, 2)(x)\n")
        assert "line 2 of your cell" in evaluate("99.1", answer).error

    def test_a_wrong_signature_gets_a_hint_about_the_stub(self):
        outcome = evaluate("99.1", lambda: 1)
        assert outcome.status == "wrong" and "positional argument" in outcome.error
        assert "stub's name and arguments" in outcome.hint

    def test_an_error_is_shown_with_the_input_and_a_hint(self):
        answer = learner("def answer(x):\n    return x @ torch.ones(7)\n")
        outcome = evaluate("99.1", answer)
        assert outcome.given.startswith("answer(x=tensor([") and "shape" in outcome.hint
        own = evaluate("99.2", answer)
        assert own.given == "ones" and own.hint == "look at the sizes"
        assert "line 2 of your cell" in own.error

    def test_a_wrong_answer_is_shown_with_the_input_and_hint_from_for_input(self):
        outcome = evaluate("99.2", lambda x: x)
        assert (outcome.given, outcome.hint) == ("ones", "look at the sizes")

    def test_a_traceback_inside_a_message_is_shortened_to_its_last_line(self):
        answer = learner(
            "def answer(x):\n"
            "    try:\n"
            "        [][1]\n"
            "    except IndexError:\n"
            "        import traceback\n"
            "        raise RuntimeError('Caught in replica 0\\n' + traceback.format_exc())\n"
        )
        error = evaluate("99.1", answer).error
        assert error.splitlines()[0] == "IndexError: list index out of range"
        assert "Traceback" not in error and "of your cell" in error and len(error) < 300

    def test_multiline_text_stays_in_its_column(self):
        rows = str(evaluate("99.1", learner("def answer(x):\n    return x + y\n"))).splitlines()
        column = next(row for row in rows if "NameError" in row).index("NameError")
        (second,) = [row for row in rows if "in line 2" in row]
        assert second.index("in line 2") == column and second[:column].isspace()

    def test_a_value_is_judged_wrong_if_a_function_is_expected(self):
        outcome = evaluate("99.1", torch.ones(2))
        assert outcome.status == "wrong" and "function itself" in outcome.hint

    def test_a_result_of_the_wrong_type_is_judged_wrong(self):
        assert evaluate("99.1", lambda x: None).status == "wrong"
        assert evaluate("99.1", lambda x: x.tolist()).status == "wrong"


def test_evaluate_rejects_an_unknown_exercise():
    with pytest.raises(ValueError, match=r"no exercise has the id '1\.99'"):
        evaluate("1.99", 3)
    with pytest.raises(ValueError, match="no exercise has the id 'seven'"):
        evaluate("seven", 3)


def test_expect_equal_does_not_accept_a_bool_as_a_number():
    expect_equal(1, 1)
    with pytest.raises(Wrong):
        expect_equal(True, 1)
    with pytest.raises(Wrong):
        expect_equal(torch.ones(2), torch.zeros(2))


def test_expect_gradients_returns_the_largest_difference_of_all_parameters():
    exact, near = (torch.nn.ParameterList(torch.zeros(2) for _ in range(3)) for _ in range(2))
    for index, (right, yours) in enumerate(zip(exact, near, strict=True)):
        right.grad, yours.grad = torch.ones(2), torch.ones(2)
        yours.grad[1] += 1e-6 if index == 1 else 0
    assert core.expect_gradients(near, exact) == pytest.approx(1e-6, rel=0.1)


@pytest.mark.usefixtures("doubled")
def test_check_records_a_solved_exercise_and_reset_forgets_it(capsys):
    check("99.1", lambda x: x**2)
    assert records.solved() == set()
    check("99.1", lambda x: x * 2)
    assert records.solved() == {"99.1"}
    assert "99.1 ✓" in str(progress())
    reset()
    assert "Cleared 1 solved exercise." in capsys.readouterr().out
    assert "99.1 ·" in str(progress())


@pytest.mark.usefixtures("doubled")
def test_check_reports_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path / "file"))
    check("99.1", lambda x: x * 2)
    shown = capsys.readouterr().out
    assert "right" in shown and "COURSE_PROGRESS_DIR" in shown
