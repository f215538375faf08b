"""The workshop: cores to hand out, and a page whose timetable fits."""

import json
import re
import zipfile

import pytest

from helpers.course import sections
from teaching import lessons, workshop

HALVES = (
    ("morning", workshop.MORNING, workshop.MORNING_MINUTES),
    ("afternoon", workshop.AFTERNOON, workshop.AFTERNOON_MINUTES),
)


@pytest.mark.parametrize(("half", "numbers", "minutes"), HALVES, ids=("morning", "afternoon"))
def test_a_timetable_fills_its_time_and_leaves_slack_for_each_core(half, numbers, minutes):
    rows = workshop.timetable(half, numbers, minutes)
    clock = since_a_break = 0
    for start, given, what in rows:
        assert start == clock, what
        clock += given
        since_a_break = 0 if what == workshop.BREAK else since_a_break + given
        assert since_a_break <= 100, f"no break before {what!r}"
    assert clock == minutes
    core = workshop.cores(numbers)
    for path, own in core.items():
        title = lessons.cells(path)[0].source.partition("\n")[0].removeprefix("# ")
        (given,) = (given for _, given, what in rows if what.startswith(title))
        assert given >= 1.2 * own, f"{title}: {given} minutes for a core of {own:.0f}"


def test_the_workshop_consists_of_the_cores_and_a_page(tmp_path, capsys):
    workshop.main([str(tmp_path / "workshop")])
    assert "your page" in capsys.readouterr().out
    page = (tmp_path / "workshop.md").read_text("utf-8")
    numbers = (*workshop.MORNING, *workshop.AFTERNOON)
    assert re.findall(r"^### (\d\d) ", page, re.MULTILINE) == list(numbers)
    assert "workshop.zip" in page and page.count("| time | minutes | what |") == 2
    with zipfile.ZipFile(tmp_path / "workshop.zip") as file:
        names = [name for name in file.namelist() if name.endswith(".ipynb")]
        made = {name.rpartition("/")[2]: json.loads(file.read(name)) for name in names}
        (readme,) = (
            file.read(n).decode() for n in file.namelist() if n.count("/") == 1 and "README" in n
        )
    assert set(made) == {path.name for path in workshop.cores(numbers)}
    for path in lessons.NOTEBOOKS:
        assert (f"](notebooks/{path.name})" in readme) == (path.name in made)
    for name, notebook in made.items():
        prose = "\n".join(sections.source(cell) for cell in notebook["cells"])
        assert "with *more*" not in prose and len(sections.core(notebook["cells"])) > 20
        for target in re.findall(r"\]\(([\w.]+\.ipynb)\)", prose):
            assert target in made, f"{name} links to {target}, which was left out"
    with pytest.raises(SystemExit, match="already exists"):
        workshop.main([str(tmp_path / "workshop")])
