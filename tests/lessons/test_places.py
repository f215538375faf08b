"""Files that mention lessons agree with the notebooks."""

import re

import pytest

from teaching import lessons

README = (lessons.ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (lessons.ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
NUMBERED = [path for path in lessons.NOTEBOOKS if lessons.number(path)]
CHECKS = lessons.ROOT / "helpers" / "checks" / "lessons"


def title(path):
    return re.match(r"# (.*)", lessons.cells(path)[0].source)[1]


def minutes(path):
    return re.search(r"\*\*Time:\*\* about (\d+) minutes", lessons.cells(path)[0].source)[1]


def test_the_readmes_table_matches_the_notebooks():
    rows = re.findall(r"^\| \[(.*)\]\(notebooks/(.*)\) \| (\d+) \| .+ \|$", README, re.MULTILINE)
    assert rows == [(title(path), path.name, minutes(path)) for path in lessons.NOTEBOOKS]


def test_the_teaching_guide_has_a_part_for_each_lesson():
    parts = re.findall(r"^### (\d\d · .*)$", GUIDE, re.MULTILINE)
    assert parts == [title(path) for path in NUMBERED]


def test_checks_and_wrong_answers_have_a_file_for_each_lesson():
    names = [f"lesson_{lessons.number(path)}.py" for path in NUMBERED]
    for folder in (CHECKS, lessons.ROOT / "tests" / "support" / "wrong_answers"):
        assert sorted(path.name for path in folder.glob("lesson_*.py")) == names


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_no_lesson_contains_leftover_template_text(path):
    number = lessons.number(path)
    places = {f"{path.name}: {cell.id}": cell.source for cell in lessons.cells(path)}
    for file in lessons.ROOT.glob(f"*/**/lesson_{number}.py"):
        places[file.relative_to(lessons.ROOT)] = file.read_text(encoding="utf-8")
    for line in README.splitlines():
        if path.name in line:
            places["README.md"] = line
    for part in re.split(r"^(?=##)", GUIDE, flags=re.MULTILINE):
        if part.startswith(f"### {number} "):
            places["docs/teaching.md"] = part
    left = [str(name) for name, text in places.items() if "TODO" in text]
    assert not left, f"still to be written: {left}"


def test_discussion_questions_follow_the_order_of_the_lessons():
    text = (lessons.ROOT / "docs" / "discussion.md").read_text(encoding="utf-8")
    parts = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    titles = [part.partition("\n")[0] for part in parts]
    assert titles == [title(path) for path in NUMBERED]
    for part in parts:
        assert re.findall(r"^(\d)\. \*\*.+\?\*\* Often: \*", part, re.M) == ["1", "2", "3"], part
