"""Folders as learners hand them in: multiple copies, lost tags, missing cells, other files."""

import csv
import json
import os
import shutil

import pytest
from learners import LESSON, LIMITS, SOLUTIONS, hand_in, statuses

from teaching import class_check, lessons


def test_class_check_survives_missing_cells_and_broken_files_and_judges_the_newest_copy(tmp_path):
    cut = json.loads(LESSON.read_text("utf-8"))
    cut["cells"] = [c for c in cut["cells"] if "check-4.2" not in c["metadata"].get("tags", ())]
    hand_in(tmp_path, "cut", {}, cut)
    for who, text in {"torn": "{", "odd": '{"cells": [1]}', "empty": '{"cells": null}'}.items():
        (tmp_path / who).mkdir()
        (tmp_path / who / LESSON.name).write_text(text)
    old = hand_in(tmp_path, "twice", {"4.1": "def replica_sizes(b, n):\n    return b"})
    newer = old.parent / f"copy of {old.name}"
    old.rename(newer)
    # Modification times decide, not names.
    (newer.parent / old.name).write_text(LESSON.read_text("utf-8"))
    found = statuses(tmp_path)
    assert found["cut", "4.2"].status == "missing"
    assert found["cut", "4.1"].status == "not attempted"
    for who in ("torn", "odd", "empty"):
        assert found[who, "4.1"].status == "missing"
        assert "not a notebook" in found[who, "4.1"].message
    assert found["twice", "4.1"].status == "not attempted"


def test_class_check_finds_answers_without_tags_and_ignores_edited_checks(tmp_path):
    untagged = json.loads(LESSON.read_text("utf-8"))
    for cell in untagged["cells"]:
        if "stub-4.1" in cell["metadata"].get("tags", ()):
            cell["source"] = lessons.solution(LESSON, "4.1")
        if "check-4.2" in cell["metadata"].get("tags", ()):
            cell["source"] = "print('Exercise 4.2: right')"
        cell["metadata"] = {}
    hand_in(tmp_path, "one", {}, untagged)
    found = statuses(tmp_path)
    assert found["one", "4.1"].status == "right"
    assert found["one", "4.2"].status == "not attempted"


@pytest.mark.parametrize("content", ["nothing", "empty", "file"])
def test_class_check_rejects_a_folder_without_a_class(tmp_path, content):
    folder = tmp_path / "class"
    if content == "empty":
        (folder / "someone").mkdir(parents=True)
    if content == "file":
        folder.write_text("")
    with pytest.raises(ValueError, match="folder"):
        class_check.check_class(folder, LIMITS)


def test_every_learner_is_in_the_table_whatever_the_folder_contains(tmp_path, capsys):
    folder = tmp_path / "class"
    hand_in(folder, "Ada", {"4.1": SOLUTIONS["4.1"]})
    odd = {}
    for who in ("deep", "folder", "link", "loop", "pipe", "zip", "none", "large", "bom"):
        (folder / who).mkdir()
        odd[who] = folder / who / LESSON.name
    odd["deep"].write_text('{"cells": ' + "[" * 100_000)
    odd["folder"].mkdir()
    odd["link"].symlink_to(folder / "nowhere")
    (folder / "loop" / "again").symlink_to(folder / "loop")
    os.mkfifo(odd["pipe"])
    (folder / "zip" / "homework.zip").write_bytes(b"PK")
    with odd["large"].open("wb") as file:
        file.truncate(10**12)
    odd["bom"].write_bytes(b"\xef\xbb\xbf" + LESSON.read_bytes())
    # A name from another system that isn't UTF-8, and one that would break the table.
    strange = [os.fsencode(folder) + b"/M\xfcller", os.fsencode(folder) + b"/a\nb"]
    for name in strange:
        os.mkdir(name)
        shutil.copy(LESSON, os.fsdecode(name))
    class_check.main([str(folder), "--csv", str(tmp_path / "all.csv")])
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:-3]] == sorted([*odd, "Ada", r"M\xfcller", r"a\nb"])
    with (tmp_path / "all.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    messages = {row["who"]: row["message"] for row in rows}
    assert messages["zip"] == (
        "no lesson in this folder: homework.zip is not a notebook; unpack it there and check again"
    )
    assert messages["none"] == messages["folder"] == "no lesson in this folder"
    for who in ("link", "pipe"):
        assert messages[who] == f"no lesson in this folder: {LESSON.name} is not a notebook"
    assert "is not a notebook: maximum recursion" in messages["deep"]
    assert "is not a notebook: it is larger than 64" in messages["large"]
    statuses_of = {row["who"]: row["status"] for row in rows if row["exercise"] == "4.2"}
    assert {statuses_of[who] for who in ("bom", r"M\xfcller", r"a\nb")} == {"not attempted"}


def test_folders_with_only_zip_files_are_reported(tmp_path):
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "ada.zip").write_bytes(b"PK")
    with pytest.raises(
        ValueError, match=r"no folder with a lesson .*; unpack ada.zip, for example"
    ):
        class_check.check_class(tmp_path / "class", LIMITS)
