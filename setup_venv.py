"""Create the course's virtual environment, and print each step: ``make venv``, or run this file.

It needs only the standard library. A Python that's too old must still parse it, to print an error.
"""

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit("setup: the course needs Python 3.11 or newer, as in: make lab PYTHON=python3.13")
import tomllib

ROOT = Path(__file__).resolve().parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
TRIED = PROJECT["tool"]["course"]["tried-torch"]
MACHINE = f"{platform.system()} {platform.machine()}, Python %d.%d" % sys.version_info[:2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# pip settings that decide which releases it finds; others are for mirrors and certificates.
CHOOSING = ("constraint", "find-links", "extra-index-url", "no-index")


def main():
    parser = argparse.ArgumentParser(description="Make the course's virtual environment.")
    parser.add_argument("--cpu", action="store_true", help="use PyTorch's CPU builds (smaller)")
    parser.add_argument("--cuda", action="store_true", help="use PyTorch's builds with CUDA")
    parser.add_argument("--wheels", metavar="DIR", help="install from that folder, offline")
    parser.add_argument("--torch", metavar="2.14.1", help="an environment with that release")
    parser.add_argument("--save-wheels", metavar="DIR", help="save all packages into that folder")
    parser.add_argument("--extra", choices=EXTRAS, help="install this extra's packages, too")
    options = parser.parse_args()
    torch = torch_requirement(options.torch)
    venv = ROOT / (".venv-torch" + options.torch if options.torch else ".venv")
    with open(__file__, "rb") as own:
        # Wait for another setup in this folder. Windows and some file systems have no locks.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(own, fcntl.LOCK_EX)
        make(venv, torch, options)
    if options.extra:
        pip(venv, "install", "--quiet", *EXTRAS[options.extra]) or give_up(venv)
    if options.save_wheels:
        # The last two build the course's own package, which then needs no network.
        wanted = [*source(options), torch, f"{ROOT}[course]", "hatchling", "editables"]
        pip(venv, "wheel", "--quiet", "--wheel-dir", options.save_wheels, *wanted) or give_up(venv)
        say(f"done; without a network, on {MACHINE}: make lab WHEELS={options.save_wheels}")


def say(text):
    print("setup:", text, flush=True)


def torch_requirement(release):
    """Return pip's requirement. A release is 2.14 or 2.14.1; the default is pyproject.toml's."""
    if not release:
        return "torch"
    oldest = int(TRIED[0].split(".")[1])
    number = re.fullmatch(r"2\.(\d+)(\.\d+)?", release)
    if not number or int(number[1]) < oldest:
        sys.exit(f"setup: TORCH={release} isn't 2.{oldest} or newer, such as {', '.join(TRIED)}")
    return f"torch=={release}" if number[2] else f"torch=={release}.*"


def python_of(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def stamp(folder=ROOT):
    """Return ready.txt's text, which identifies the environment's folder, machine and packages."""
    return f"{folder}\n{MACHINE}\n{hashlib.sha256(str(PROJECT).encode()).hexdigest()}"


def make(venv, torch, options):
    """Create the environment if there is none, and install what pyproject.toml requires now."""
    ready, wanted = venv / "ready.txt", stamp()
    found = ready.read_text("utf-8") if ready.exists() else ""
    if not found and venv.is_dir() and any(venv.iterdir()):
        sys.exit(
            f"setup: {venv} wasn't created by this setup and is left alone; remove it, then retry"
        )
    runs = python_of(venv).exists()
    if found == wanted and runs:
        return
    say(f"installing all packages into {venv.name} in this folder")
    if not runs or found.splitlines()[:2] != wanted.splitlines()[:2]:
        # If this runs inside the environment that will be emptied, its base Python takes over.
        python = getattr(sys, "_base_executable", sys.executable)
        for step in (["venv", "--clear", "--without-pip", venv], ["ensurepip"]):
            if subprocess.run([python, "-I", "-m", *step], stdout=subprocess.DEVNULL).returncode:
                sys.exit(f"setup: {python} can't make a venv; on Debian, install python3-venv")
            ready.write_text("unfinished", "utf-8")
            python = python_of(venv)
    install(venv, torch, options)
    ready.write_text(wanted, "utf-8")
    say("done")


def install(venv, torch, options):
    """Install the course and its packages."""
    command = ["install", *source(options), torch, "--editable", f"{ROOT}[course]"]
    if pip(venv, *command) and builds_match(venv):
        return
    settings, hindrances = without_choosing_settings(venv)
    if options.torch and hindrances:
        # A requested release is installed from wherever it's available.
        say(f"that failed; trying again without this machine's pip settings, {hindrances}")
        pip(venv, "uninstall", "--quiet", "--yes", "torch", "torchvision")
        if pip(venv, *command, environment=settings) and builds_match(venv):
            return
        say(f"PyTorch {options.torch} can't be installed, with or without these settings")
    give_up(venv)


def give_up(venv):
    sys.exit(
        f"setup: installing failed, see above. Check the network (or that the wheels are for {MACHINE}) "
        f"and the disk ({shutil.disk_usage(venv).free // 10**9} GB are free; 3 to 10 are needed)"
    )


def source(options):
    """Return pip's options for where to get PyTorch.

    On Linux, PyPI's builds include CUDA; PyTorch's own index has smaller ones without it.
    """
    if options.wheels:
        say(f"installing packages from {options.wheels}; nothing is downloaded")
        return ["--no-index", "--find-links", Path(options.wheels).absolute()]
    if platform.system() != "Linux":
        return []
    cuda = options.cuda or shutil.which("nvidia-smi")
    small = options.cpu or (not cuda and answers(CPU_INDEX))
    size = "0.5 GB, without CUDA (CUDA=1 includes it)" if small else "2.7 GB, with CUDA"
    say(f"downloading PyTorch and other packages, {size}; this takes a few minutes, once")
    return ["--extra-index-url", CPU_INDEX] if small else []


def answers(index):
    try:
        return urllib.request.urlopen(f"{index}/torch/", timeout=4).status == 200
    except OSError:
        return False


def pip(venv, *arguments, environment=os.environ):
    """Run pip; return whether it succeeded. It unpacks gigabytes, and /tmp may be too small."""
    with tempfile.TemporaryDirectory(dir=venv) as scratch:
        environment = {**environment, "TMPDIR": scratch, "PIP_USER": "0"}
        command = [python_of(venv), "-I", "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, env=environment).returncode == 0


def builds_match(venv):
    """Return whether torchvision matches this build of torch; otherwise it can't be imported."""
    script = "import sys; sys.tracebacklimit = 0; import torchvision"
    return subprocess.run([python_of(venv), "-I", "-c", script]).returncode == 0


def without_choosing_settings(venv):
    """Return the environment and pip settings without those in CHOOSING; list the latter as text."""
    command = [python_of(venv), "-I", "-m", "pip", "config", "list"]
    variables, left_out = {**os.environ, "PIP_CONFIG_FILE": os.devnull}, []
    listed = subprocess.check_output(command, text=True)
    for name, value in re.findall(r"^.*\.([\w-]+)=(.*)$", listed, re.MULTILINE):
        variable = "PIP_" + name.upper().replace("-", "_")
        if name in CHOOSING:
            left_out.append(f"{name}={value}")
            variables.pop(variable, None)
        else:
            variables.setdefault(variable, value.strip("'"))
    return variables, ", ".join(sorted(set(left_out)))


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"setup: {error}")
