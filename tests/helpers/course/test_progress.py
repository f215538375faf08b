"""Lesson 00's overview, routes and progress are computed from the lessons themselves."""

import json
import re

import pytest

from helpers import course
from helpers.checks import check, exercises, guess, records, reset
from teaching import lessons


def test_every_lesson_is_listed_with_its_link_and_minutes():
    table = course.overview(lessons.ROOT / "notebooks")
    assert list(table.links.values()) == [path.name for path in lessons.NOTEBOOKS]
    for path, row in zip(lessons.NOTEBOOKS, table.rows, strict=True):
        assert row[0].startswith(f"{lessons.number(path) or 'Appendix'} · ")
        assert 0 < row[1] <= row[2]
        own = lessons.exercise_ids(path)
        assert row[4].endswith(f"of {len(own)}") if own else row[4] == ""


def test_routes_name_existing_lessons_and_add_up_their_minutes(tmp_path):
    names = {"00_a": 15, "02_b": 50, "04_c": 30, "12_d": 60, "appendix_old_code": 25}
    for name, minutes in names.items():
        cells = [
            {"cell_type": "markdown", "metadata": {}, "source": "**Minutes:** 10"},
            {"cell_type": "markdown", "metadata": {"tags": ["more"]}, "source": "## More"},
            {"cell_type": "markdown", "metadata": {}, "source": f"**Minutes:** {minutes - 10}"},
        ]
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    rows = {re.split("[:,]", row[0])[0]: row[1:] for row in course.routes(tmp_path).rows}
    assert rows["quick"] == ("00, 04, 12", "0.5", "1.8")
    assert rows["old code"] == ("02, 04, old code", "0.5", "1.8")
    assert rows["everything"] == ("00 to 12", "0.7", "2.6")


def test_each_route_through_the_course_has_at_least_three_lessons():
    for _, lessons_of_route, hours, _ in course.routes(lessons.ROOT / "notebooks").rows:
        assert len(lessons_of_route) > 2 and float(hours) > 0.5
    with pytest.raises(FileNotFoundError, match="no lessons in"):
        course.routes(lessons.ROOT / "tests")


def test_overview_counts_solved_exercises_and_guesses(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path))
    check("0.1", lambda batch_size, gpu_count: -(-batch_size // gpu_count))
    guess("0a", 15).compare(15)
    guess("0b", 15).compare(30)
    assert course.overview(lessons.ROOT / "notebooks").rows[0][4:] == ("1 of 1", "1 of 2")
    reset()
    assert course.overview(lessons.ROOT / "notebooks").rows[0][4:] == ("0 of 1", "")


def test_the_progress_message_names_the_next_exercise(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path))
    order = [item.id for item in exercises()]
    assert f"exercise {order[0]} " in course.go_on()
    records.record_solved(order[4])
    assert f"exercise {order[5]} " in course.go_on()
    assert course.overview(lessons.ROOT / "notebooks").caption == course.go_on()
    records.record_solved(order[-1])
    assert course.go_on().startswith(f"Still open: {order[0]}, ")
    for name in order:
        records.record_solved(name)
    assert course.go_on() == "Every exercise is solved."


def test_overview_rejects_a_folder_without_lessons(tmp_path):
    with pytest.raises(FileNotFoundError, match="run this in notebooks/"):
        course.overview(tmp_path)
