"""`make venv` wherever it is typed: small clones, whose packages need no network, in odd places.

Their course is one empty module with a build backend of its own; setup, Makefile and pip are real.
"""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest

import pytorch_builds
from teaching.lessons import ROOT

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "small-course"
version = "1"
dependencies = [
]

[project.optional-dependencies]
course = [
]
"""
BACKEND = '''
"""As little of PEP 660 as pip needs to install one module from this folder."""
import pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    here = pathlib.Path(__file__).parent
    with zipfile.ZipFile(pathlib.Path(folder, "small_course-1-py3-none-any.whl"), "w") as wheel:
        info = "small_course-1.dist-info/"
        wheel.writestr("small_course.pth", str(here))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: small-course\\nVersion: 1\\nProvides-Extra: course\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "small_course-1-py3-none-any.whl"

build_wheel = build_editable
'''
# Nothing that starts from here may read the user's files or reach a network.
PLAIN = {"PATH": os.environ["PATH"], "HTTPS_PROXY": "http://127.0.0.1:9"}
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs the command make")


def small_clone(folder):
    folder.mkdir(parents=True)
    for name in ("Makefile", "find_python.sh", "setup_venv.py", "pytorch_builds.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    return folder


def make(folder, *arguments, prefix=(), **environment):
    """Run make there; what it said, and whether it succeeded."""
    environment = {**PLAIN, "HOME": str(folder.parent), **environment}
    done = subprocess.run(
        [*prefix, "make", "--no-print-directory", "venv", *arguments],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.stdout, done.returncode == 0


def fakes(folder, **scripts):
    """A folder of commands for PATH: the shell's own few, and these scripts."""
    folder.mkdir()
    for name in ("sh", "env", "cat", "mkdir", "make", "mktemp", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    for name, script in scripts.items():
        path = folder / name.replace("_", ".")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return str(folder)


REAL = f'exec "{sys.executable}" "$@"'
# As a Python that is too old, or has no ensurepip, answers when it is asked.
UNFIT = f'[ "$1" = -c ] && exit 1; exec "{sys.executable}" "$@"'


def test_odd_places_and_variables_do_not_matter_nor_does_the_network(tmp_path):
    folder = small_clone(tmp_path / "Größe & Spaß" / "my course")
    (tmp_path / "decoy").mkdir()
    (tmp_path / "decoy" / "argparse.py").write_text("raise ImportError('the wrong argparse')")
    said, good = make(
        folder,
        prefix=["sh", "-c", 'umask 077; exec "$@"', "sh"],
        PYTHONPATH=str(tmp_path / "decoy"), PYTHONOPTIMIZE="2", PIP_TARGET=str(tmp_path / "target"),
        PIP_USER="1", PIP_PREFIX=str(tmp_path / "target"), VIRTUAL_ENV="/nowhere", LC_ALL="C",
    )  # fmt: skip
    assert good, said
    assert "setup: PYTHONPATH is set; it is left aside here" in said and "setup: done" in said
    assert not (tmp_path / "target").exists()
    assert make(folder, LC_ALL="C") == ("", True)  # The second call finds all in place.
    # As Binder and conda do: into an environment that is there, by its own Python.
    here = [folder / ".venv" / "bin" / "python", "setup_venv.py", "--here"]
    subprocess.run(here, cwd=folder, env=PLAIN, check=True, capture_output=True)


def test_folders_with_spaces_in_their_names_are_one_argument_each(tmp_path):
    without_settings_of_this_make = {**PLAIN, "HOME": str(tmp_path)}

    def asked(*arguments):
        """The last command that make would give."""
        done = subprocess.run(
            ["make", "-n", "--no-print-directory", *arguments],
            cwd=ROOT, env=without_settings_of_this_make, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return shlex.split(done.stdout.splitlines()[-1])

    for target in ("student", "solved", "exam", "slides", "book"):
        assert asked(target, "OUT=/x/my class")[-1] == "/x/my class"
        assert asked(target)[-1].startswith("build/")
    # Some shells do not replace it in OUT=~/my, and quotes keep the recipe's from it.
    assert asked("student", "OUT=~/my class")[-1] == f"{tmp_path}/my class"
    assert asked("class", "CLASS=handed in", "ARGS=--gib 2")[-3:] == ["handed in", "--gib", "2"]
    assert asked("class")[-1] == "teaching.class_check"  # which says that a folder is missing


@pytest.mark.parametrize("home", ["", "/nonexistent", "/proc"])
def test_a_home_that_takes_no_files_is_replaced(tmp_path, home):
    folder = small_clone(tmp_path / "course")
    (folder / "Makefile").write_text((folder / "Makefile").read_text() + "home:\n\t@echo $$HOME\n")
    (folder / ".venv").write_text("stop the setup here")
    said, _ = make(folder, HOME=home)
    assert f"the home folder takes no files; {folder}/.home stands in for it" in said
    said = subprocess.run(["make", "home"], cwd=folder, env={**PLAIN, "HOME": home},
                          capture_output=True, text=True)  # fmt: skip
    assert said.stdout.strip() == f"{folder}/.home"


def test_what_stands_at_the_environments_name_is_left_alone(tmp_path):
    folder = small_clone(tmp_path / "course")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "pyvenv.cfg").write_text("mine")
    said, good = make(folder)
    assert not good and "is a folder that this setup did not make, and it stays as it is" in said
    assert (folder / ".venv" / "pyvenv.cfg").read_text() == "mine"


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({"python3_12": REAL}, "python3.12"),
        ({"python3": UNFIT, "python3_13": REAL}, "python3.13"),
        ({"uv": 'echo "/from/$1/$2"'}, "/from/python/find"),
        ({"uv": '[ "$2" = install ] && touch x; [ -e x ] && echo /new; [ -e x ]'}, "/new"),
        ({"python3": UNFIT}, "python3"),
    ],
)
def test_the_first_python_that_will_do_is_found(tmp_path, commands, said):
    path = fakes(tmp_path / "bin", touch=f'exec {shutil.which("touch")} "$@"', **commands)
    done = subprocess.run(["sh", ROOT / "find_python.sh"], env={"PATH": path}, cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].endswith(said)


def test_no_python_at_all_gets_one_sentence(tmp_path):
    folder = small_clone(tmp_path / "course")
    said, good = make(folder, PATH=fakes(tmp_path / "bin"))
    assert not good and "setup: there is no Python here; install version 3.11 or newer" in said
    said, good = make(folder, "PYTHON=python9.9")
    assert not good and "setup: there is no python9.9 here; name another Python" in said


def test_a_python_without_ensurepip_gets_one_sentence(tmp_path):
    folder = small_clone(tmp_path / "course")
    # As Debian's Python without the package python3-venv.
    hidden = f"""exec "{sys.executable}" -c "import sys; sys.modules['ensurepip'] = None
sys.argv = sys.argv[1:]; sys.path[0] = '.'; import runpy
runpy.run_path(sys.argv[0], run_name='__main__')" "$@" """
    said, good = make(
        folder, PATH=fakes(tmp_path / "bin", python3=f'[ "$1" = -c ] && exit 1\n{hidden}')
    )
    assert not good
    assert f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in said


def in_mount_namespace(script):
    """A prefix that runs a command after ``script``, which mounts things for it alone."""
    return in_namespace(script, "--mount")


def in_namespace(script, kind):
    """A prefix that runs a command after ``script``, with mounts or a network for it alone."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a namespace for a test needs Linux, root and unshare")
    prefix = ["unshare", kind, "sh", "-c", f'{script} && cd . && exec "$@"', "sh"]
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine refuses unshare {kind}: {done.stderr.strip()}")
    return prefix


def test_a_read_only_clone_gets_one_sentence(tmp_path):
    folder = small_clone(tmp_path / "course")
    (tmp_path / "home").mkdir()
    bound = f'mount --bind -o ro "{folder}" "{folder}" && cd "{folder}"'
    said, good = make(folder, prefix=in_mount_namespace(bound), HOME=str(tmp_path / "home"))
    assert not good and f"{folder} cannot be written to (Read-only file system)" in said


def test_a_small_disk_gets_one_sentence(tmp_path):
    folder = small_clone(tmp_path / "course")
    small = f'mount -t tmpfs -o size=50m none "{folder}"'
    files = f'cp "{folder}"/* "{tmp_path}/copy" && {small} && cp "{tmp_path}/copy"/* "{folder}"'
    (tmp_path / "copy").mkdir()
    said, good = make(folder, prefix=in_mount_namespace(f'{files} && cd "{folder}"'))
    assert not good and "0.1 GB are free here and about" in said
    full = f'{files} && cd "{folder}" && {{ cat /dev/zero >filler 2>/dev/null; true; }}'
    said, good = make(folder, prefix=in_mount_namespace(full))
    assert not good and "0.0 GB are free here" in said


def test_wheels_of_a_folder_install_without_a_network_or_room_for_temporary_files(tmp_path):
    folder = small_clone(tmp_path / "course")
    project = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project.replace("[\n]", '[\n    "needed",\n]', 1))
    backend = (folder / "backend.py").read_text()
    wanted = backend.replace(
        "Version: 1\\nProvides", "Version: 1\\nRequires-Dist: needed\\nProvides"
    )
    assert wanted != backend
    (folder / "backend.py").write_text(wanted)
    stick = tmp_path / "a stick"
    stick.mkdir()
    with zipfile.ZipFile(stick / "needed-1-py3-none-any.whl", "w") as wheel:
        info = "needed-1.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
        wheel.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(info + "RECORD", "")
    (stick / "made_for.txt").write_text(pytorch_builds.machine_of(sys.executable))
    small = tmp_path / "small"
    small.mkdir()
    mounted = in_mount_namespace(f'mount -t tmpfs -o size=8k none "{small}"')
    prefix = [*mounted, *in_namespace("true", "--net")]
    python = f"PYTHON={sys.executable}"
    said, good = make(folder, f"WHEELS={stick}", python, prefix=prefix, TMPDIR=str(small))
    assert good and f"taking the packages from {stick}; nothing is downloaded" in said, said
    assert list(folder.glob(".venv/lib/*/site-packages/needed-1.dist-info"))
    assert not list(folder.glob(".venv/tmp*"))
    said, good = make(folder, "WHEELS=/nowhere", python)
    assert (said, good) == ("", True)  # all is in place
    shutil.rmtree(folder / ".venv")
    said, good = make(folder, "WHEELS=/nowhere", python)
    assert not good and "/nowhere has no wheels of this course" in said
