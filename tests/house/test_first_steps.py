"""`make venv` in a new, minimal clone, without a network.

Its torch is an empty package; the Makefile, setup, venv and pip are real.
"""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest

from teaching.lessons import ROOT

BACKEND = '''
"""As little of PEP 660 as pip needs to install from this folder."""
import zipfile

METADATA = """Metadata-Version: 2.1
Name: multi-gpu-pytorch-hands-on
Version: 1
Requires-Dist: torch
Requires-Dist: torchvision; extra == "course"
Provides-Extra: course
"""

def build_editable(folder, config_settings=None, metadata_directory=None):
    name, info = "multi_gpu_pytorch_hands_on-1-py3-none-any.whl", "multi_gpu_pytorch_hands_on-1.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
'''
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n\n'
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs the command make")


def write_wheel(folder, name, version, needs=""):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A USB stick with two releases of PyTorch, usable as a folder of wheels and as an index."""
    stick = tmp_path_factory.mktemp("a stick")
    for torch, vision in (("2.14.1", "0.29.1"), ("2.15.0", "0.30.0")):
        write_wheel(stick, "torch", torch)
        write_wheel(stick, "torchvision", vision, f"Requires-Dist: torch=={torch}")
    for name in ("torch", "torchvision"):
        files = sorted(stick.glob(f"{name}-*"))
        (stick / name).mkdir()
        links = [f'<a href="../{path.name}">{path.name}</a>' for path in files]
        (stick / name / "index.html").write_text("<!DOCTYPE html>" + "".join(links))
    return stick


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "Größe & Spaß" / "my course"
    folder.mkdir(parents=True)
    for name in ("Makefile", "find_python.sh", "setup_venv.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    project = (folder / "pyproject.toml").read_text("utf-8")
    project = BUILD + project[project.index("[project]") :]
    (folder / "pyproject.toml").write_text(project, "utf-8")
    (folder / "backend.py").write_text(BACKEND)
    return folder


def make(folder, *arguments, **environment):
    """Run ``make venv`` in ``folder``; return its output, and whether it succeeded."""
    plain = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        ["make", "--no-print-directory", "venv", f"PYTHON={sys.executable}", *arguments],
        cwd=folder, env={**plain, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.stdout, done.returncode == 0


def torch_in(venv):
    return [path.name for path in venv.glob("lib/*/site-packages/torch-*.dist-info")]


def test_wheels_in_a_folder_are_installed_once_and_without_a_network(clone, wheels, tmp_path):
    (tmp_path / "argparse.py").write_text("raise ImportError('the wrong argparse')")
    said, good = make(clone, f"WHEELS={wheels}", PYTHONPATH=str(tmp_path), PIP_USER="1")
    assert good and f"installing packages from {wheels}; nothing is downloaded" in said, said
    assert torch_in(clone / ".venv") == ["torch-2.15.0.dist-info"]
    assert make(clone) == ("", True)
    project = clone / "pyproject.toml"
    project.write_text(project.read_text("utf-8").replace('version = "', 'version = "1'), "utf-8")
    said, good = make(clone, f"WHEELS={wheels}")
    assert good and "Requirement already satisfied: torch" in said, said
    moved = clone.rename(tmp_path / "moved")
    said, good = make(moved, f"WHEELS={wheels}")
    assert good and "Successfully installed" in said, said


def test_a_requested_release_gets_a_separate_environment(clone, wheels):
    said, good = make(clone, f"WHEELS={wheels}", "TORCH=2.14.1")
    assert good, said
    assert torch_in(clone / ".venv-torch2.14.1") == ["torch-2.14.1.dist-info"]
    assert not (clone / ".venv").exists()


def test_a_requested_release_is_installed_despite_pips_constraints(clone, wheels, tmp_path):
    (tmp_path / "caps.txt").write_text("torch<2.15")
    settings = {"PIP_CONSTRAINT": str(tmp_path / "caps.txt"), "PIP_INDEX_URL": wheels.as_uri()}
    said, good = make(clone, "TORCH=2.15.0", "CUDA=1", **settings)
    assert (
        good and "trying again without this machine's pip settings" in said and "caps.txt" in said
    ), said
    assert torch_in(clone / ".venv-torch2.15.0") == ["torch-2.15.0.dist-info"]


def test_an_environment_that_setup_did_not_create_is_left_alone(clone):
    (clone / ".venv").mkdir()
    (clone / ".venv" / "pyvenv.cfg").write_text("mine")
    said, good = make(clone)
    assert not good and "wasn't created by this setup and is left alone" in said
    assert (clone / ".venv" / "pyvenv.cfg").read_text() == "mine"


def test_a_missing_python_is_reported_with_a_clear_message(tmp_path):
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    done = subprocess.run(["sh", ROOT / "find_python.sh"], env={"PATH": str(tmp_path)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode and "setup: no Python found; install version 3.11" in done.stderr


@pytest.mark.parametrize("target", ["student", "solved", "exam", "slides", "book"])
def test_a_folder_with_a_space_in_its_name_is_passed_as_one_argument(target):
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", target, "OUT=/x/my class"],
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shlex.split(done.stdout.splitlines()[-1])[-1] == "/x/my class"
