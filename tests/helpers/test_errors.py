"""``expected_error`` and ``expected_warning`` fail unless what they expect is raised."""

import warnings

import pytest

from helpers.errors import expected_error, expected_warning


def test_expected_error_shortens_the_message(capsys):
    with expected_error(ValueError, "no such thing") as caught:
        raise ValueError("no such thing\n" + "and so on\n" * 30)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "ValueError: no such thing"
    assert shown[-1] == "[...]" and len(shown) == 7
    assert caught.message.startswith("no such thing")


def test_expected_error_fails_if_nothing_is_raised():
    with (
        pytest.raises(AssertionError, match=r"expected ValueError, but .* nothing"),
        expected_error(ValueError),
    ):
        pass


def test_expected_error_fails_for_a_different_message():
    with (
        pytest.raises(AssertionError, match="lacks 'apples'; it says: pears"),
        expected_error(ValueError, "apples"),
    ):
        raise ValueError("pears")


def test_expected_error_does_not_catch_an_error_of_another_type():
    with pytest.raises(KeyError), expected_error(ValueError, "apples"):
        raise KeyError("pears")


def test_expected_error_keeps_nothing_in_the_block_alive():
    with expected_error((ValueError, TypeError)) as caught:
        raise TypeError("short")
    assert caught.error.__traceback__ is None


def test_expected_warning_shows_the_expected_one_and_passes_on_the_others(capsys):
    with pytest.warns(UserWarning, match="other"), expected_warning(FutureWarning, "old") as caught:
        warnings.warn("other", UserWarning, stacklevel=1)
        warnings.warn("old thing", FutureWarning, stacklevel=1)
    assert capsys.readouterr().out == "FutureWarning: old thing\n"
    assert caught.message == "old thing"


def test_expected_warning_fails_without_a_warning():
    with (
        pytest.raises(AssertionError, match="expected FutureWarning with 'old', got: no warning"),
        expected_warning(FutureWarning, "old"),
    ):
        pass
