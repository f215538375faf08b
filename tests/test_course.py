"""The overview of lesson 00 is read from the lessons themselves."""

import pytest

from helpers import course
from helpers.checks import check, reset
from teaching import lessons


def test_every_lesson_is_listed_with_its_link_and_minutes():
    table = course.overview(lessons.ROOT / "notebooks")
    assert list(table.links.values()) == [path.name for path in lessons.NOTEBOOKS]
    for path, row in zip(lessons.NOTEBOOKS, table.rows, strict=True):
        assert row[0].startswith(f"{lessons.number(path) or 'Appendix'} · ")
        assert int(row[1]) > 0
        own = lessons.exercise_ids(path)
        assert row[3].endswith(f"of {len(own)}") if own else row[3] == ""


def test_progress_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS_DIR", str(tmp_path))
    check("0.1", lambda batch_size, gpu_count: -(-batch_size // gpu_count))
    assert course.overview(lessons.ROOT / "notebooks").rows[0][3] == "1 of 1"
    reset()
    assert course.overview(lessons.ROOT / "notebooks").rows[0][3] == "0 of 1"


def test_another_folder_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="run this in notebooks/"):
        course.overview(tmp_path)
