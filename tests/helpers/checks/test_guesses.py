"""Predictions: taken down, shown beside the outcome, counted."""

import pytest

from helpers.checks import guess, guesses, reset
from helpers.checks.guesses import Comparison, agree


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path / "progress"))


@pytest.mark.parametrize(
    ("value", "outcome", "within", "expected"),
    [
        (30, 30, 0, True),
        (30, 31, 0, False),
        (1, True, 0, False),
        (2.4, 2.0, 0.25, True),
        (2.6, 2.0, 0.25, False),
        ([15, 15], (15, 15), 0, True),
        ([15], [15, 15], 0, False),
        (" YES", "yes", 0, True),
        ("no", "yes", 0, False),
        (None, 3, 0, False),
    ],
)
def test_agree_compares_a_guess_with_the_outcome(value, outcome, within, expected):
    assert agree(value, outcome, within) is expected


def test_a_guess_is_shown_beside_the_outcome_and_counted():
    guess("4a", [15, 15]).compare([15, 15])
    guess("4b", 8).compare(5, unit="GPUs")
    assert guesses.counts() == {"04": (2, 1)}
    shown = Comparison("4b", 8, 5, 0, "GPUs")
    assert "8 GPUs" in repr(shown) and "5 GPUs" in repr(shown) and "not as you said" in repr(shown)
    assert "not as you said" in shown._repr_html_()
    guess("4b", 5).compare(5)
    assert guesses.counts() == {"04": (2, 2)}, "a second try replaces the first"
    reset()
    assert guesses.counts() == {}


def test_without_a_guess_the_lesson_runs_on_and_nothing_is_counted():
    empty = guess("4a", ...)
    assert "three dots" in repr(empty)
    empty.compare(3)
    assert guesses.counts() == {}
    assert Comparison("4a", ..., 3, 0, "").verdict == "not guessed"


def test_guess_refuses_another_id_and_another_choice():
    with pytest.raises(ValueError, match="lesson and a letter"):
        guess("4.1", 3)
    with pytest.raises(ValueError, match="choose one of 'yes', 'no'"):
        guess("4a", "maybe", one_of=("yes", "no"))
    guess("4a", ..., one_of=("yes", "no"))


def test_compare_reports_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path / "file"))
    guess("4a", 3).compare(3)
    assert "could not be noted" in capsys.readouterr().out
