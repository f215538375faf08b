"""Paths and links in Markdown pages lead to existing files."""

import re

import pytest

from teaching.lessons import NOTEBOOKS, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

FOLDERS = {
    name: ROOT / name
    for name in ("vgpu", "helpers", "tests", "teaching", "benchmarks", "notebooks")
}
FOLDERS["docs"] = ROOT / "docs"


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_work(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        if workflow := re.match(r"\.\./\.\./actions/(workflows/\w+\.yml)", target):
            # GitHub resolves such links, to a workflow's runs and badge, relative to the page's
            # address.
            target = f".github/{workflow[1]}"
        assert (path.parent / target).exists(), f"no {target}"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_files_named_in_the_text_exist(path):
    """A name such as `dispatch/rules.py` or `lesson_NN.py` is a path or the end of one."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    for name in re.findall(r"`([\w.]+(?:/[\w.]+)*)`", text):
        is_path = name.partition("/")[0] in FOLDERS or name.endswith((".py", ".md", ".yml"))
        pattern = name.replace("NN", "*")
        places = [*ROOT.glob(pattern)]
        for folder in FOLDERS.values():
            places += folder.rglob(pattern)
        assert places or not is_path, f"no {name}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_files_of_the_repository_named_in_a_lesson_exist(path):
    for name in re.findall(r"`(\w+/[\w./]+\.\w+)`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or name.partition("/")[0] not in FOLDERS, f"no {name}"


def test_the_readmes_tree_matches_the_repository():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("## Repository layout\n\n```\n")[2].partition("```")[0]
    folder = ROOT
    for indent, name in re.findall(r"^( *)(\S+)", tree, re.MULTILINE):
        folder = ROOT / name if not indent else folder
        place = folder if not indent else folder / name
        assert "*" in name or place.exists(), f"no {place.relative_to(ROOT)}"
    for package in ("vgpu", "helpers"):
        for part in (ROOT / package).glob("*/__init__.py"):
            assert f"  {part.parent.name}/ " in tree, f"the tree lacks {package}/{part.parent.name}"
