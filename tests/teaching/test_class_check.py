"""A class's answers, judged within limits: right, wrong, endless, greedy, broken, gone."""

import json
import subprocess
import sys

import psutil
import pytest

from teaching import class_check, editions, lessons

(LESSON,) = (path for path in lessons.NOTEBOOKS if lessons.number(path) == "04")
LIMITS = class_check.Limits(time_s=20, memory_bytes=3 * 2**30)


def hand_in(folder, who, answers, notebook=None, name=LESSON.name):
    """A learner's folder with a copy of the lesson, ``answers`` typed into its exercises."""
    notebook = notebook or json.loads(LESSON.read_text("utf-8"))
    for cell in notebook["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            part, _, exercise_id = tag.partition("-")
            if part == "stub" and exercise_id in answers:
                cell["source"] = answers[exercise_id]
    path = folder / who / "notebooks" / name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook), "utf-8")
    return path


def statuses(folder, limits=LIMITS):
    verdicts = class_check.check_class(folder, limits)
    return {(verdict.who, verdict.exercise): verdict for verdict in verdicts}


def test_right_wrong_and_untouched(tmp_path):
    solutions = {name: lessons.solution(LESSON, name) for name in lessons.exercise_ids(LESSON)}
    hand_in(tmp_path, "all", solutions)
    hand_in(tmp_path, "some", {"4.1": "def replica_sizes(b, n):\n    return [b // n] * n"})
    found = statuses(tmp_path)
    assert {found["all", name].status for name in solutions} == {"right"}
    assert found["some", "4.1"].status == "wrong"
    assert "add up to" in found["some", "4.1"].message
    assert found["some", "4.2"].status == "not attempted"


def test_limits_end_an_answer_and_what_it_started_but_not_the_next_answer(tmp_path):
    pid = tmp_path / "pid"
    endless = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
        open({str(pid)!r}, "w").write(str(child.pid))
        while True: pass
    """
    indented = "\n".join(line.strip() for line in endless.strip().splitlines())
    greedy = "kept = bytearray(4 * 2**30)\nkept[::4096] = b'x' * len(kept[::4096])\nwhile 1: pass"
    right = lessons.solution(LESSON, "4.3")
    hand_in(tmp_path / "class", "one", {"4.1": indented, "4.2": greedy, "4.3": right})
    found = statuses(tmp_path / "class")
    assert found["one", "4.1"].status == "too slow"
    assert found["one", "4.2"].status == "too much memory", found["one", "4.2"]
    assert found["one", "4.3"].status == "right"
    assert not psutil.pid_exists(int(pid.read_text())) or (
        psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE
    )


def test_an_answer_that_ends_the_process_or_prints_is_told_and_the_rest_goes_on(tmp_path):
    forged = 'print(\'{"exercise": "4.2", "status": "right", "message": ""}\', flush=True)'
    answers = {"4.1": "import os; os._exit(3)", "4.2": forged, "4.3": "raise SystemExit"}
    hand_in(tmp_path, "one", answers)
    found = statuses(tmp_path)
    assert found["one", "4.1"].status == "error" and "exit code 3" in found["one", "4.1"].message
    assert found["one", "4.2"].status == "error" and "batch_for_all" in found["one", "4.2"].message
    assert found["one", "4.3"].status == "error" and "SystemExit" in found["one", "4.3"].message


def test_cells_that_are_gone_files_that_are_broken_and_the_newest_copy(tmp_path):
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


def test_tags_may_be_lost_and_the_check_may_not_be_edited(tmp_path):
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


def test_the_command_prints_a_table_and_writes_every_verdict(tmp_path):
    hand_in(tmp_path / "class", "Ada", {"4.1": lessons.solution(LESSON, "4.1")})
    command = [sys.executable, "-m", "teaching.class_check", str(tmp_path / "class")]
    done = subprocess.run(
        [*command, "--csv", str(tmp_path / "all.csv")],
        capture_output=True,
        text=True,
        cwd=lessons.ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "4.1 4.2 4.3" in done.stdout and "Ada" in done.stdout
    rows = (tmp_path / "all.csv").read_text("utf-8").splitlines()
    assert rows[0] == "who,exercise,status,message" and rows[1].startswith("Ada,4.1,right")


@pytest.mark.parametrize("content", ["nothing", "empty", "file"])
def test_a_folder_without_a_class_is_told(tmp_path, content):
    folder = tmp_path / "class"
    if content == "empty":
        (folder / "someone").mkdir(parents=True)
    if content == "file":
        folder.write_text("")
    with pytest.raises(ValueError, match="folder"):
        class_check.check_class(folder, LIMITS)


def test_the_student_edition_holds_no_solution_and_the_solved_one_all():
    for path in lessons.NOTEBOOKS:
        original = json.loads(path.read_text("utf-8"))
        student, solved = (editions.edition(original, kind) for kind in editions.EDITIONS)
        for name in lessons.exercise_ids(path):
            code = lessons.solution(path, name).strip()
            texts = ["".join(cell["source"]) for cell in student["cells"]]
            assert not any(code in text for text in texts), f"{name} is given away"
            (stub,) = [
                c for c in solved["cells"] if f"stub-{name}" in c["metadata"].get("tags", ())
            ]
            assert "".join(stub["source"]) == code
        ids = [[cell["id"] for cell in made["cells"]] for made in (original, student, solved)]
        assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize("target", ["handout", "handout.zip"])
def test_an_edition_is_a_whole_course_and_overwrites_nothing(tmp_path, target):
    count = editions.write("student", tmp_path / target)
    assert count == sum(len(lessons.exercise_ids(path)) for path in lessons.NOTEBOOKS)
    if target.endswith(".zip"):
        import zipfile

        with zipfile.ZipFile(tmp_path / target) as file:
            names = [name.partition("/")[2] for name in file.namelist()]
    else:
        root = tmp_path / target
        names = [str(path.relative_to(root)) for path in root.rglob("*")]
    for wanted in ("START.md", "Makefile", "setup_venv.py", f"notebooks/{LESSON.name}"):
        assert wanted in names
    assert not [name for name in names if "wrong_answers" in name or "__pycache__" in name]
    with pytest.raises(FileExistsError, match="exists already"):
        editions.write("student", tmp_path / target)
