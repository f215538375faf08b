"""The teaching guide's timetables add up, and the sections that it names exist."""

import re

import pytest

from teaching import lessons

GUIDE = (lessons.ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+):(\d\d) \| (\d+) \| (.*) \|$", re.MULTILINE)
TABLES = [
    [(int(h) * 60 + int(m), int(minutes), what) for h, m, minutes, what in ROW.findall(part)]
    for part in GUIDE.split("| time | minutes | what |")[1:]
]


def headings(path):
    text = "\n".join(cell.source for cell in lessons.cells(path) if not cell.is_code)
    return set(re.findall(r"^#+ (.*)$", text, re.MULTILINE))


def test_timetables_add_up():
    assert len(TABLES) == 13
    for table in TABLES:
        clock = since_a_break = 0
        for start, minutes, what in table:
            assert start == clock, f"{what!r} begins at minute {start}, not {clock}"
            clock += minutes
            since_a_break = 0 if what in ("Break", "Lunch") else since_a_break + minutes
            assert since_a_break <= 120, f"more than two hours without a break, at {what!r}"
        assert 200 <= clock <= 450, f"{clock} minutes is neither half a day nor a day"


@pytest.mark.parametrize("row", [row[2] for table in TABLES for row in table if "](" in row[2]])
def test_a_timetable_names_sections_and_exercises_that_exist(row):
    path = lessons.ROOT / "docs" / re.search(r"\]\((.*?)\)", row)[1]
    assert path.resolve() in lessons.NOTEBOOKS
    for section in re.findall(r"\*(.+?)\*", row):
        assert section in headings(path.resolve()), f"{path.name} has no heading {section!r}"
    for name in re.findall(r"\b\d+\.\d+\b", row):
        assert name in lessons.exercise_ids(path.resolve())


def test_every_lesson_has_a_part_that_names_existing_sections():
    parts = dict(re.findall(r"^### (\d\d) · .*?\n(.*?)(?=^##)", GUIDE, re.MULTILINE | re.DOTALL))
    numbered = {lessons.number(path): path for path in lessons.NOTEBOOKS if lessons.number(path)}
    assert parts.keys() == numbered.keys()
    for number, text in parts.items():
        for word in ("**Ask:**", "**Goes wrong:**", "**With real GPUs:**"):
            assert word in text, f"lesson {number} lacks {word}"
        for section in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text):
            everywhere = set().union(*map(headings, numbered.values()))
            assert section in everywhere, f"lesson {number}: no heading {section!r}"
