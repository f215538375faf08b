"""Which lines are the learner's: not Python's, not a package's, not the course's own."""

import sysconfig
from pathlib import Path

import pytest
import torch

import helpers.checks.on_ranks
from helpers.checks import blame, core
from teaching.exam import planning as exam
from vgpu.launch import call_sites as places
from vgpu.launch import launcher
from vgpu.launch.own_code import is_learners, is_library

# Fedora keeps compiled packages apart from the others, and Debian has folders of its own.
LIBRARIES = [
    Path(sysconfig.get_path("stdlib"), "threading.py"),
    Path(sysconfig.get_path("platlib"), "numpy", "linalg.py"),
    Path("/usr/lib64/python3.13/site-packages/numpy/linalg.py"),
    Path("/usr/lib/python3/dist-packages/yaml/loader.py"),
    Path("/home/ada/.local/lib/python3.12/site-packages/einops/layers.py"),
    Path(torch.__file__).parent / "nn" / "parallel" / "distributed.py",
    Path(launcher.__file__),
]


@pytest.mark.parametrize("path", [*map(str, LIBRARIES), "<frozen importlib._bootstrap>"])
def test_libraries(path):
    assert is_library(path) and not is_learners(path)


@pytest.mark.parametrize("path", [helpers.checks.on_ranks.__file__, core.__file__, exam.__file__])
def test_the_course_itself_is_neither(path):
    assert not is_library(path) and not is_learners(path)


@pytest.mark.parametrize("path", ["<cell 1>", "/tmp/ipykernel_7/2718281828.py", "train.py"])
def test_the_learners_own(path):
    assert is_learners(path) and not is_library(path)


def test_a_torch_that_was_built_from_source_is_a_library():
    assert is_library(torch.__file__)


def test_a_file_is_looked_up_once_however_many_frames_are_in_it(monkeypatch, tmp_path):
    """A look at a rank asks of thousands of frames; it took 0.15 s of each rank's time."""
    looked_up, resolve = [], Path.resolve

    def counted(path, *args):
        looked_up.append(path)
        return resolve(path, *args)

    monkeypatch.setattr(Path, "resolve", counted)
    train = str(tmp_path / "train.py")
    for line in range(100):
        assert places.own_place([(torch.__file__, line), (train, line)]).filename == train
    assert len(looked_up) < 10


def test_a_wrong_answer_is_reported_at_the_learners_line_although_a_package_raised():
    """The error came from a compiled package's own folder, which the checks once forgot."""
    names = {}
    source = "def pick(numbers):\n    raise LookupError('no such row')\n"
    exec(compile(source, "/usr/lib64/python3.13/site-packages/frames/pick.py", "exec"), names)
    exec(compile("def answer():\n    return pick([])\n", "<cell 1>", "exec"), names)
    try:
        names["answer"]()
    except LookupError as error:
        said = blame.own_line(error)
    assert "in line 2 of your cell" in said
