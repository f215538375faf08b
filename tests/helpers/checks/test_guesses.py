"""Predictions are made or skipped, shown next to the outcome, and counted."""

import pytest

from helpers.checks import guess, guesses, reset
from helpers.checks.guesses import agree


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path / "progress"))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)


@pytest.fixture
def displayed(monkeypatch):
    """What's displayed in a kernel started by a Jupyter server."""
    monkeypatch.setenv("JPY_SESSION_NAME", "04_dataparallel_shapes.ipynb")
    shown = []
    monkeypatch.setattr(guesses, "display", shown.append)
    return shown


@pytest.mark.parametrize(
    ("value", "outcome", "within", "expected"),
    [
        (30.0, 30, 0, True),
        (30.0, 31, 0, False),
        (2.4, 2.0, 0.25, True),
        (2.6, 2.0, 0.25, False),
        ([15.0, 15.0], (15, 15), 0, True),
        ([4.0, 2.0, 4.0, 2.0], [[4, 2], [4, 2]], 0, True),
        ([15.0], [15, 15], 0, False),
        ("YES", "yes", 0, True),
        ("no", "yes", 0, False),
        (False, False, 0, True),
    ],
)
def test_agree_compares_a_guess_with_the_outcome(value, outcome, within, expected):
    assert agree(value, outcome, within) is expected


@pytest.mark.parametrize("value", [(8, 0), [8, 0], "8,0", "(8, 0)", " 8 and 0 GPUs"])
def test_guess_reads_numbers_leniently(value):
    assert guess("4b", value, numbers=2).value == [8, 0]


@pytest.mark.parametrize("value", ["Same", " same ", "'same'"])
def test_guess_reads_choices_leniently(value):
    assert guess("4b", value, one_of=("same", "different")).value == "same"


def test_guess_rejects_an_invalid_id_an_unknown_choice_and_too_few_numbers():
    with pytest.raises(ValueError, match="lesson and a letter"):
        guess("4.1", 3)
    with pytest.raises(ValueError, match="choose one of yes, no; got maybe"):
        guess("4a", "maybe", one_of=("yes", "no"))
    with pytest.raises(ValueError, match="asks for 2 numbers; got 1 in '8'"):
        guess("4a", 8, numbers=2)


def test_compare_rejects_an_outcome_with_more_numbers_than_the_guess():
    with pytest.raises(ValueError, match=r"write guess\('4a', numbers=2\)"):
        guess("4a").compare((15, 15))


def test_a_guess_is_shown_next_to_the_outcome_and_counted(capsys):
    guess("4a", [15, 15], numbers=2).compare([15, 15])
    guess("4b", 8).compare(5, unit="GPUs")
    assert guesses.counts() == {"04": (2, 1)}
    shown = capsys.readouterr().out
    assert "8 GPUs" in shown and "5 GPUs" in shown and "not as you predicted" in shown
    guess("4b", 5).compare(5)
    assert guesses.counts() == {"04": (2, 2)}, "a second try must replace the first"
    reset()
    assert guesses.counts() == {}


def test_an_outcome_without_a_front_end_is_shown_but_not_counted(capsys):
    guess("4a").compare(3)
    shown = capsys.readouterr().out
    assert "not guessed" in shown and "outcome  3" in shown
    assert guesses.counts() == {}


def test_a_button_makes_a_guess_and_opens_its_explanation(displayed):
    asked = guess("4a", one_of=("same", "different"))
    asked.compare("same")
    controls, shown = displayed
    (before,) = shown.outputs
    assert before["data"] == {"text/plain": "Make guess 4a above, or skip it, to see the outcome."}
    same, different, skip = controls.children[0].children
    different.click()
    comparison, opening = shown.outputs
    assert "not as you predicted" in comparison["data"]["text/html"]
    assert "details.why-4a" in opening["data"]["application/javascript"]
    assert same.disabled and different.disabled and skip.disabled
    assert guesses.counts() == {"04": (1, 0)}


def test_a_skipped_guess_shows_the_outcome_and_is_not_counted(displayed):
    asked = guess("4a")
    displayed[0].children[0].children[-1].click()
    asked.compare(7)
    comparison, opening = displayed[1].outputs
    assert "not guessed" in comparison["data"]["text/plain"]
    assert "details.why-4a" in opening["data"]["application/javascript"]
    assert guesses.counts() == {}


def test_a_text_field_says_what_is_missing_and_accepts_another_try(displayed):
    guess("4a", numbers=2).compare((8, 0))
    (field, _), message = displayed[0].children[0].children, displayed[0].children[1]
    field.value = "8"
    assert "asks for 2 numbers" in message.value and not field.disabled
    field.value = "8,0"
    assert "8, 0" in message.value and field.disabled
    assert "as you predicted" in displayed[1].outputs[0]["data"]["text/plain"]
    assert guesses.counts() == {"04": (1, 1)}


def test_compare_reports_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path / "file"))
    guess("4a", 3).compare(3)
    assert "could not be saved" in capsys.readouterr().out
