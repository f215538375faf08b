"""Editions to hand out: one without solutions, one solved, each a complete course."""

import json
import re
import shutil
import subprocess

import pytest

from teaching import editions, lessons

(LESSON,) = (path for path in lessons.NOTEBOOKS if lessons.number(path) == "04")


def test_the_student_edition_has_no_solutions_and_the_solved_one_has_all_of_them():
    for path in lessons.NOTEBOOKS:
        original = json.loads(path.read_text("utf-8"))
        student, solved = (editions.edition(original, kind) for kind in editions.EDITIONS)
        for name in lessons.exercise_ids(path):
            code = lessons.solution(path, name).strip()
            (folded,) = lessons.tagged(path, f"solution-{name}")
            # Some lessons show the expected code after the exercise.
            shown = [c.id for c in lessons.cells(path) if code in c.source and c.id != folded.id]
            left = [c["id"] for c in student["cells"] if code in "".join(c["source"])]
            assert left == shown, f"{name} is given away"
            (stub,) = [
                c for c in solved["cells"] if f"stub-{name}" in c["metadata"].get("tags", ())
            ]
            assert "".join(stub["source"]) == code
        ids = [[cell["id"] for cell in made["cells"]] for made in (original, student, solved)]
        assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize("target", ["handout", "handout.zip"])
def test_an_edition_is_a_complete_course_and_overwrites_nothing(tmp_path, target):
    count = editions.write("student", tmp_path / target)
    assert count == sum(len(lessons.exercise_ids(path)) for path in lessons.NOTEBOOKS)
    if target.endswith(".zip"):
        import zipfile

        with zipfile.ZipFile(tmp_path / target) as file:
            names = [name.partition("/")[2] for name in file.namelist()]
    else:
        root = tmp_path / target
        names = [str(path.relative_to(root)) for path in root.rglob("*")]
    for wanted in (
        "START.md",
        "Makefile",
        "setup_venv.py",
        "open_lab.py",
        f"notebooks/{LESSON.name}",
    ):
        assert wanted in names
    aside = ("wrong_answers", "__pycache__", "teaching", "discussion")
    assert not [name for name in names if any(word in name for word in aside)]
    if not target.endswith(".zip"):
        readme = (root / "README.md").read_text("utf-8")
        assert "](notebooks/07_ddp.ipynb)" in readme and "badge.svg" not in readme
        _leads_nowhere_else(root, readme)
        for page in [*root.glob("*.md"), *root.glob("docs/*.md")]:
            for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text("utf-8")):
                assert ":" in link or (page.parent / link).exists(), f"{page.name}: {link}"
    with pytest.raises(FileExistsError, match="already exists"):
        editions.write("student", tmp_path / target)


def _leads_nowhere_else(root, readme):
    """Check that the README names only existing files, and commands that need none left out."""
    assert "docker build" in readme and "Binder" in readme and "## Teach with it" not in readme
    for wanted in ("Dockerfile", ".devcontainer/devcontainer.json", "binder/postBuild"):
        assert (root / wanted).is_file()
    tree = readme.partition("## Repository layout\n\n```\n")[2].partition("```")[0]
    places = [line.split()[0] for line in tree.splitlines() if not line.startswith(" ")]
    assert {"vgpu/", "helpers/"} <= set(places) and "  *.py " in tree
    assert all((root / place).exists() for place in places), places
    if shutil.which("make"):
        offered = subprocess.run(
            ["make", "--no-print-directory", "help"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        named = set(re.findall("make ([a-z-]+)", offered))
        assert named == {"lab", "test", "wheels", "clean"}, offered
    makefile = (root / "Makefile").read_text("utf-8").replace("$(wildcard tests)", "")
    for target in set(re.findall(r"\bmake ([a-z-]+)", readme.partition("## Contribute")[0])):
        (recipe,) = re.findall(rf"^{target}: venv\n((?:\t.*\n)*)", makefile, re.MULTILINE) or [""]
        assert not re.search("teaching|tests|benchmarks", recipe), f"make {target}"
