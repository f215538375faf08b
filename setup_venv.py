"""Makes the course's virtual environment, or finds that it is ready, and says what it does.

Run by the Makefile; on Windows without make, run it by hand: ``py setup_venv.py``. It needs nothing
but Python's standard library. Python 3.6 must still be able to read this file, so that it can say
that it is too old.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 11)
GB = 1000**3
# JupyterLab paints only the cells in view and guesses the heights of the others; links and the
# outline would then miss their heading. The lessons are short enough to be painted whole.
LAB_SETTINGS = {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}

# On Linux, PyPI's torch brings the CUDA libraries along; elsewhere it does not.
# Sums of what pip downloaded and of the folder afterwards, torch 2.15 on Linux x86-64.
LINUX = {"download": "2.7 GB", "minutes": "3 to 15", "disk": 9 * GB}
OTHER = {"download": "0.5 GB", "minutes": "1 to 5", "disk": 3 * GB}


class SetupError(Exception):
    """What stands in the way, in one sentence that says what to do."""


def main():
    parser = argparse.ArgumentParser(description="Make the course's virtual environment.")
    parser.add_argument("--cpu", action="store_true", help="take PyTorch's CPU builds (smaller)")
    options = parser.parse_args()
    try:
        require_python(sys.version_info[:3])
        found = problem(VENV, wanted_stamp())
        if found:
            make(found, options.cpu)
    except SetupError as error:
        sys.exit("setup: %s" % error)


def require_python(version):
    """Raise SetupError for a Python that is too old; ``version`` is (major, minor, micro)."""
    if tuple(version[:2]) < OLDEST:
        raise SetupError(
            "the course needs Python 3.11 or newer and this is %s; install a newer one and name it, "
            "as in: make lab PYTHON=python3.13" % ".".join(str(part) for part in version)
        )


def require_disk(free_bytes, cpu):
    """Raise SetupError where fewer bytes are free than the packages take."""
    needed = size(cpu)["disk"]
    if free_bytes < needed:
        raise SetupError(
            "%.1f GB are free here and about %d GB are needed; make room, or move the folder to a "
            "larger disk" % (free_bytes / GB, needed // GB)
        )


def size(cpu):
    """What to expect: the download, the minutes, and the bytes on disk."""
    return LINUX if platform.system() == "Linux" and not cpu else OTHER


def wanted_stamp():
    """A text that changes when the packages, JupyterLab's settings or the Python change."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        digest = hashlib.sha256(file.read() + json.dumps(LAB_SETTINGS).encode()).hexdigest()
    return "python %d.%d, wanted %s\n" % (sys.version_info[0], sys.version_info[1], digest)


def problem(venv, stamp):
    """Why the environment cannot be used as it is, or "" where it can."""
    if not os.path.isdir(venv):
        return "missing"
    try:
        with open(os.path.join(venv, "ready.txt"), encoding="utf-8") as file:
            ready = file.read()
    except OSError:
        return "half-made"
    script = "import sys, importlib.metadata as m\nfor name in sys.argv[1:]: m.version(name)"
    command = [python_of(venv), "-I", "-c", script, *dependencies()]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return "broken"
    return "" if ready == stamp else "outdated"


def dependencies():
    """Names of the packages in pyproject.toml, and of the course itself."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        text = file.read()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE).group(1)
    own = re.search(r'^name = "(.*)"', text, re.MULTILINE).group(1)
    return [*re.findall(r'"([A-Za-z0-9_.-]+)', listed), own]


def python_of(venv):
    """The interpreter inside an environment."""
    windows = platform.system() == "Windows"
    return os.path.join(venv, *(("Scripts", "python.exe") if windows else ("bin", "python")))


def make(found, cpu):
    """Make the environment anew, or bring an outdated one up to date, and install the course."""
    print("setup: the environment .venv is %s." % found)
    if found != "outdated":
        shutil.rmtree(VENV, ignore_errors=True)
        require_disk(shutil.disk_usage(ROOT).free, cpu)
        run(
            [sys.executable, "-m", "venv", VENV],
            "the environment could not be made; on Debian and Ubuntu, install python3-venv",
        )
    expect = size(cpu)
    print("setup: downloading about %(download)s, once; this takes %(minutes)s minutes." % expect)
    print("setup: all packages go into .venv in this folder.", flush=True)
    started = time.time()
    python = python_of(VENV)
    if os.path.exists(os.path.join(VENV, "ready.txt")):
        os.remove(os.path.join(VENV, "ready.txt"))
    failed = "installing failed, see above; check the network and the disk, then run the same again"
    install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    if cpu:
        run([*install, "uv"], failed)
        install = [python, "-m", "uv", "pip", "install", "--python", python]
    options = ["--torch-backend", "cpu"] if cpu else []
    run([*install, *options, "--editable", ROOT], failed)
    # JupyterLab would ask at its first start whether to fetch news; the course needs no network.
    news = "@jupyterlab/apputils-extension:announcements"
    run(
        [python, "-m", "jupyter", "labextension", "disable", "--level=sys_prefix", news],
        "JupyterLab could not be set up; run the same again",
        quiet=True,
    )
    settings = os.path.join(VENV, "share", "jupyter", "lab", "settings")
    os.makedirs(settings, exist_ok=True)
    with open(os.path.join(settings, "overrides.json"), "w", encoding="utf-8") as file:
        json.dump(LAB_SETTINGS, file)
    with open(os.path.join(VENV, "ready.txt"), "w", encoding="utf-8") as file:
        file.write(wanted_stamp())
    print("setup: done in %d s." % (time.time() - started), flush=True)


def run(command, sentence, quiet=False):
    """Run a command; SetupError with ``sentence`` where it fails. ``quiet`` shows errors only."""
    shown = subprocess.PIPE if quiet else None
    try:
        done = subprocess.run(command, stdout=shown, stderr=shown, universal_newlines=True)
    except OSError as error:
        raise SetupError(sentence) from error
    if done.returncode:
        print((done.stdout or "") + (done.stderr or ""), file=sys.stderr)
        raise SetupError(sentence)


if __name__ == "__main__":
    main()
