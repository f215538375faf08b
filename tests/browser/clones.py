"""Clones of the course in which to try its first command as a new user would."""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import setup_venv
from teaching.lessons import ROOT

LEFT_OUT = (".venv*", ".git", "build", "dist", "__pycache__", ".*_cache", "*.egg-info")


def clone(folder: Path) -> Path:
    """Copy the course's files, without an environment, to a new folder; return the folder."""
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))


def lend_environment(folder: Path) -> None:
    """Give a clone this environment, as if setup had created one there.

    Packages are links to the existing ones. Files that contain the environment's location, or that
    setup writes, are the clone's own, so the course that runs is the clone's.
    """
    mine, venv = Path(sys.prefix), folder / ".venv"
    packages = Path(sysconfig.get_path("purelib"))
    hide = shutil.ignore_patterns("site-packages", "lib64", "__pycache__")
    shutil.copytree(mine, venv, symlinks=True, ignore=hide)
    theirs = venv / packages.relative_to(mine)
    theirs.mkdir()
    for path in packages.iterdir():
        if path.name.startswith("multi_gpu_pytorch_hands_on-"):
            shutil.copytree(path, theirs / path.name)
            record = {"dir_info": {"editable": True}, "url": folder.as_uri()}
            (theirs / path.name / "direct_url.json").write_text(json.dumps(record))
        elif path.suffix == ".pth" and "multi_gpu_pytorch_hands_on" in path.name:
            (theirs / path.name).write_text(str(folder), encoding="utf-8")
        else:
            (theirs / path.name).symlink_to(path)
    (venv / "ready.txt").write_text(setup_venv.stamp(folder), "utf-8")
