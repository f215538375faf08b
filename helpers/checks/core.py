"""Check an exercise: turn the learner's answer into an Outcome.

A lesson's checks are in ``lessons/lesson_NN.py``. Each is a function of the answer that raises
Wrong if the answer isn't right. Otherwise, it returns what the answer achieved, as names and values
(``{"your peak": "12.0 MiB", "budget": "16.0 MiB"}``), or None if there's nothing to show. Checks
are looked up by exercise id: "4.2" is the second exercise in lesson 04.
"""

import html
import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from IPython.display import display

from helpers.checks import blame, records
from helpers.checks.describing import describe, difference, told_apart
from vgpu.tables import Table

Status = Literal["not attempted", "wrong", "right"]
Checker = Callable[[Any], Mapping[str, Any] | None]

_exercises: dict[str, "Exercise"] = {}


class Wrong(Exception):
    """A wrong answer: its result, the expected one, the input, and a hint.

    ``yours`` and ``expected`` are values, or descriptions of values. If ``expected`` isn't a
    string, or if ``values`` is true, strings count as values and are quoted, so '3' and 3 look
    different. Values are compared, and the verdict says where they differ most.
    """

    def __init__(
        self, *, yours: Any, expected: Any, given: Any = None, hint: str = "", values: bool = False
    ) -> None:
        super().__init__(hint)
        if values or not isinstance(expected, str):
            self.yours, self.expected = told_apart(yours, expected)
            self.difference = difference(yours, expected)
        else:
            self.yours, self.expected, self.difference = _as_text(yours), expected, ""
        self.given = "" if given is None else _as_text(given)
        self.hint = hint


class _Raised(Exception):
    """Raised from an answer's error, with the input that caused it and a hint."""

    def __init__(self, given: str, hint: str) -> None:
        super().__init__(hint)
        self.given, self.hint = given, hint


@dataclass(frozen=True)
class Exercise:
    """One exercise: its id, a title of a few words, and the function that checks it."""

    id: str
    title: str
    checker: Checker
    callable_answer: bool


@dataclass(frozen=True)
class Outcome:
    """The verdict on one answer; unused fields are empty."""

    exercise: str
    title: str
    status: Status
    yours: str = ""
    expected: str = ""
    difference: str = ""
    given: str = ""
    hint: str = ""
    error: str = ""
    achieved: tuple[tuple[str, str], ...] = ()

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("for", self.given),
            ("yours", self.yours),
            ("expected", self.expected),
            ("difference", self.difference),
            ("error", self.error),
            ("hint", self.hint),
            *self.achieved,
        ]
        return [(name, text) for name, text in rows if text]

    def _headline(self) -> str:
        verdict = {"not attempted": "not attempted yet", "wrong": "not right yet", "right": "right"}
        return f"Exercise {self.exercise} · {self.title}: {verdict[self.status]}"

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self._rows()), default=0) + 2
        further = "\n" + " " * (width + 2)
        rows = (
            f"  {name:<{width}}{further.join(text.splitlines())}" for name, text in self._rows()
        )
        return "\n".join([self._headline(), *rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        color = {"not attempted": "#999999", "wrong": "#D55E00", "right": "#009E73"}[self.status]
        rows = "".join(
            f"<tr><td style='text-align:left;vertical-align:top'>{name}</td>"
            f"<td style='text-align:left'><code style='white-space:pre-wrap'>{html.escape(text)}"
            "</code></td></tr>"
            for name, text in self._rows()
        )
        return (
            f"<div style='border-left:6px solid {color};padding:4px 12px'>"
            f"<b>{html.escape(self._headline())}</b>{f'<table>{rows}</table>' if rows else ''}</div>"
        )


def exercise(
    exercise_id: str, title: str, *, callable_answer: bool = True
) -> Callable[[Checker], Checker]:
    """Register a check. With ``callable_answer``, only a function or class can be right."""

    def register(checker: Checker) -> Checker:
        _exercises[exercise_id] = Exercise(exercise_id, title, checker, callable_answer)
        return checker

    return register


def exercises() -> list[Exercise]:
    """Return every exercise in the course, in order."""
    for path in sorted((Path(__file__).parent / "lessons").glob("lesson_*.py")):
        importlib.import_module(f"helpers.checks.lessons.{path.stem}")
    # The exam's tasks are registered like exercises, but aren't part of the course.
    every = _exercises.values()
    of_course = [item for item in every if not item.checker.__module__.startswith("teaching.")]
    return sorted(of_course, key=lambda item: [int(n) for n in item.id.split(".")])


def progress() -> Table:
    """Return a table of solved and open exercises per lesson."""
    return records.solved_by_lesson([item.id for item in exercises()])


def check(exercise_id: str, answer: Any) -> None:
    """Check an answer, show the verdict, and record it if it's right.

    ``answer`` is what the exercise asks for: usually a function, sometimes a value. ``...`` and
    functions that still raise a bare NotImplementedError count as not attempted. Raises ValueError
    for an unknown id.
    """
    outcome = evaluate(exercise_id, answer)
    display(outcome)
    if outcome.status == "right":
        problem = records.record_solved(exercise_id)
        if problem:
            print(problem)


def evaluate(exercise_id: str, answer: Any) -> Outcome:
    """Return the verdict on an answer, without showing or recording it."""
    item = _find(exercise_id)
    try:
        if _untouched(answer):
            return Outcome(item.id, item.title, "not attempted")
        if item.callable_answer and not callable(answer):
            raise Wrong(
                yours=answer,
                expected="a function or class",
                given="the argument to check",
                hint="Pass the function itself, without calling it.",
            )
        achieved = item.checker(answer) or {}
    except Wrong as wrong:
        return Outcome(item.id, item.title, "wrong", **vars(wrong))
    except _Raised as raised:
        assert raised.__cause__ is not None
        return _failed(item, raised.__cause__, raised.given, raised.hint)
    except Exception as error:
        if _is_stub(error):
            return Outcome(item.id, item.title, "not attempted")
        return _failed(item, error, blame.call_of(error), "")
    shown = tuple((name, _as_text(value)) for name, value in achieved.items())
    return Outcome(item.id, item.title, "right", achieved=shown)


@contextmanager
def for_input(given: Any, hint: str = "") -> Iterator[None]:
    """Make the verdict name this input if anything goes wrong inside the block.

    ``hint`` is used for errors, and for a Wrong without a hint of its own.
    """
    try:
        yield
    except Wrong as wrong:
        wrong.given = wrong.given or _as_text(given)
        wrong.hint = wrong.hint or hint
        raise
    except _Raised:  # inside a nested block, which has set its own input
        raise
    except Exception as error:
        if _is_stub(error):
            raise
        raise _Raised(_as_text(given), hint) from error


def expect_equal(yours: Any, expected: Any, *, given: Any = None, hint: str = "") -> None:
    """Raise Wrong unless ``yours`` equals ``expected``; booleans don't equal numbers."""
    if isinstance(expected, torch.Tensor) or isinstance(yours, torch.Tensor):
        expect_close(yours, expected, given=given, hint=hint, rtol=0, atol=0)
    elif isinstance(yours, bool) != isinstance(expected, bool) or yours != expected:
        raise Wrong(yours=yours, expected=expected, given=given, hint=hint, values=True)


def expect_close(
    yours: Any,
    expected: Any,
    *,
    given: Any = None,
    hint: str = "",
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Raise Wrong unless both are close, according to ``torch.testing.assert_close``."""
    try:
        torch.testing.assert_close(yours, expected, rtol=rtol, atol=atol)
    except (AssertionError, TypeError, ValueError) as unequal:
        raise Wrong(
            yours=yours, expected=expected, given=given, hint=hint, values=True
        ) from unequal


def expect_tensor(yours: Any, *, given: Any = None, hint: str = "Return a tensor.") -> None:
    """Raise Wrong unless ``yours`` is a tensor."""
    if not isinstance(yours, torch.Tensor):
        raise Wrong(yours=yours, expected="a tensor", given=given, hint=hint)


def expect_whole_number(yours: Any, least: int, most: int, *, given: Any = None, hint: str) -> None:
    """Raise Wrong unless ``yours`` is an int from ``least`` to ``most``."""
    if isinstance(yours, bool) or not isinstance(yours, int) or not least <= yours <= most:
        expected = f"an integer from {least} to {most}"
        raise Wrong(yours=repr(yours), expected=expected, given=given, hint=hint)


def expect_number(yours: Any, expected: str, hint: str = "") -> None:
    """Raise Wrong unless ``yours`` is an int or a float; the verdict shows ``expected``."""
    if isinstance(yours, bool) or not isinstance(yours, int | float):
        raise Wrong(yours=repr(yours), expected=expected, hint=hint)


def expect_two(yours: Any, expected: str, hint: str = "") -> None:
    """Raise Wrong unless ``yours`` is a tuple or list of two; the verdict shows ``expected``."""
    if not isinstance(yours, tuple | list) or len(yours) != 2:
        raise Wrong(yours=describe(yours), expected=expected, hint=hint)


def expect_graph(yours: torch.Tensor, what: str, hint: str) -> None:
    """Raise Wrong unless ``yours`` requires a gradient; the verdict calls it ``what``."""
    if not yours.requires_grad:
        expected = f"{what} that backward can start from"
        raise Wrong(yours=f"{what} without a graph", expected=expected, hint=hint)


def expect_gradients(
    yours: Iterable[torch.Tensor],
    expected: Iterable[torch.Tensor],
    hint: str = "A gradient is wrong.",
) -> float:
    """Raise Wrong unless the parameters have the same gradients; return the largest difference."""
    largest = 0.0
    for mine, theirs in zip(yours, expected, strict=True):
        assert theirs.grad is not None
        if mine.grad is None:
            raise Wrong(
                yours="a parameter without a gradient",
                expected="a gradient for every parameter",
                hint="Something cuts the graph: move tensors only with .to(), and detach nothing.",
            )
        gradient, right = mine.grad.cpu(), theirs.grad.cpu()
        expect_close(gradient, right, hint=hint)
        largest = max(largest, (gradient - right).abs().max().item())
    return largest


def hint_by_value(
    yours: float, wrong: Mapping[str, float], otherwise: str, within: float = 0.01
) -> str:
    """Return the hint for the wrong value that ``yours`` is close to; if there's none, ``otherwise``.

    ``within`` is the relative tolerance.
    """
    hints = (hint for hint, value in wrong.items() if math.isclose(yours, value, rel_tol=within))
    return next(hints, otherwise)


def _find(exercise_id: str) -> Exercise:
    known = re.fullmatch(r"(\d+)\.\d+", str(exercise_id))
    module = f"helpers.checks.lessons.lesson_{int(known[1]):02d}" if known else ""
    if module and importlib.util.find_spec(module):
        importlib.import_module(module)
    if exercise_id not in _exercises:
        names = ", ".join(item.id for item in exercises())
        raise ValueError(f"no exercise has the id {exercise_id!r}; the ids are {names}")
    return _exercises[exercise_id]


def _untouched(answer: Any) -> bool:
    if isinstance(answer, (tuple, list)):
        return any(_untouched(part) for part in answer)
    if isinstance(answer, dict):
        return any(_untouched(part) for part in answer.values())
    # A stub is recognized by its code, since calling it may need ranks.
    return answer is ... or _body(answer) == _body(_stub)


def _stub() -> None:
    raise NotImplementedError


def _body(answer: Any) -> tuple[Any, Any]:
    code = getattr(answer, "__code__", None)
    return getattr(code, "co_code", None), getattr(code, "co_names", None)


def _failed(item: Exercise, error: BaseException, given: str, hint: str) -> Outcome:
    text = "\n".join(filter(None, (blame.said(error), blame.own_line(error))))
    hint = blame.hint_for(error, hint)
    return Outcome(item.id, item.title, "wrong", given=given, error=text, hint=hint)


def _is_stub(error: BaseException) -> bool:
    """Return whether the error comes from an unchanged stub."""
    return type(error) is NotImplementedError and not error.args


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else describe(value)
