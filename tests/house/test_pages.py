"""The paths that the pages name are there, and their links lead somewhere."""

import re

import pytest

from teaching.lessons import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), f"no {target}"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_paths_in_the_text_are_there(path):
    """Every `folder/file` in backquotes that begins with a folder of the repository."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    folders = "|".join(folder.name for folder in ROOT.iterdir() if folder.is_dir())
    for target in re.findall(rf"`((?:{re.escape('.ci')}|{folders})/[\w./*]*)`", text):
        pattern = target.replace("NN", "*")
        assert list(ROOT.glob(pattern)) or "build" in target, f"no {target}"
