"""Makes the course's virtual environment, or finds that it is ready, and says what it does.

Run by the Makefile; without make, run it by hand: ``py setup_venv.py``. It needs nothing but
Python's standard library. Python 3.6 must still be able to read this file, so that it can say
that it is too old.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse

from pytorch_builds import GB, SMALL, Builds, choose, machine_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = os.path.dirname(os.path.realpath(__file__))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 11)
# JupyterLab paints only the cells in view and guesses the heights of the others; links and the
# outline would then miss their heading. The lessons are short enough to be painted whole.
LAB_SETTINGS = {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}
# JupyterLab would ask at its first start whether to fetch news; the course needs no network.
LAB_DISABLED = {"@jupyterlab/apputils-extension:announcements": True}

# In a folder of wheels: the kind of machine that they are for.
WHEELS_NOTE = "made_for.txt"
# What ready.txt in .venv says until all is installed. The file marks .venv as this script's own.
UNFINISHED = "not finished\n"
# Where pip installs, and whether, is this script's business; mirrors and proxies are the user's.
LEFT_ASIDE = (
    *("PYTHONHOME", "PYTHONPATH", "PIP_DRY_RUN", "PIP_NO_DEPS", "PIP_PREFIX", "PIP_PYTHON"),
    *("PIP_REQUIRE_HASHES", "PIP_ROOT", "PIP_TARGET", "PIP_USER"),
)
# Run by the environment's Python: does it have all packages, and the course from this folder?
EXAMINE = """
import importlib.metadata, json, os, sys, urllib.parse, urllib.request
root, *names = sys.argv[1:]
for name in names:
    found = importlib.metadata.distribution(name)
address = urllib.parse.urlsplit(json.loads(found.read_text("direct_url.json"))["url"])
there = urllib.request.url2pathname(address.path)
here = os.path.exists(there) and os.path.samefile(there, root)
print(*sys.version_info[:2], "here" if here else "elsewhere")
"""


class SetupError(Exception):
    """What stands in the way, in one sentence that says what to do."""


def main():
    parser = argparse.ArgumentParser(description="Make the course's virtual environment.")
    builds = parser.add_mutually_exclusive_group()
    builds.add_argument("--cpu", action="store_true", help="take PyTorch's CPU builds (smaller)")
    builds.add_argument("--cuda", action="store_true", help="take PyTorch's builds with CUDA")
    builds.add_argument("--wheels", metavar="DIR", help="install from that folder, offline")
    parser.add_argument("--save-wheels", metavar="DIR", help="put all packages into that folder")
    parser.add_argument(
        "--this-python", action="store_true", help="make .venv anew if it has another Python"
    )
    parser.add_argument("--extra", help="install these packages too: browser, slides or book")
    parser.add_argument(
        "--here", action="store_true", help="install into the running Python's own environment"
    )
    options = parser.parse_args()
    try:
        if options.here:
            require_python(sys.version_info[:3])
            install(sys.executable, sys.prefix, builds_for(options), options.wheels)
            return
        with alone():
            python = sys.version_info[:2] if options.this_python else None
            found = problem(VENV, wanted_stamp(), python)
            if found:
                make(found, builds_for(options), options.wheels)
            if options.extra:
                add(options.extra)
            if options.save_wheels:
                save_wheels(options.save_wheels, choose(options.cpu, options.cuda))
    except (SetupError, OSError) as error:
        sys.exit("setup: %s" % error)
    except KeyboardInterrupt:
        sys.exit("setup: stopped; run the same again to go on.")


def builds_for(options):
    """The builds of PyTorch that are installed here; those of a folder are what they are."""
    if not options.wheels:
        return choose(options.cpu, options.cuda)
    require_wheels(options.wheels)
    return Builds(None, *SMALL, why="")


@contextlib.contextmanager
def alone():
    """Wait until no other set-up of this folder is under way, and keep others waiting.

    The lock is on this file: it needs no place of its own and ends with the process. Where Python
    has no such lock (Windows), nobody waits.
    """
    with open(os.path.realpath(__file__), "rb") as own:
        if fcntl is not None:
            try:
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("setup: another set-up of this folder is under way; waiting.", flush=True)
                fcntl.flock(own, fcntl.LOCK_EX)
            except OSError:
                print("setup: this file system has no locks; run one set-up at a time.")
        yield


def require_python(version):
    """Raise SetupError for a Python that is too old; ``version`` is (major, minor, micro)."""
    if tuple(version[:2]) < OLDEST:
        raise SetupError(
            "the course needs Python 3.11 or newer and this is %s; install a newer one and name it, "
            "as in: make lab PYTHON=python3.13" % ".".join(str(part) for part in version)
        )


def require_ensurepip():
    """Raise SetupError if this Python cannot put pip into an environment."""
    try:
        import ensurepip  # noqa: F401
    except ImportError as error:
        raise SetupError(
            "this Python (%s) cannot make environments, since its module ensurepip is missing; "
            "on Debian and Ubuntu: apt-get install python%d.%d-venv"
            % (sys.executable, sys.version_info[0], sys.version_info[1])
        ) from error


def require_writable(folder):
    """Raise SetupError if nothing can be written into a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SetupError(
            "%s cannot be written to (%s), and the packages go into .venv there; clone the course "
            "to a folder of your own" % (folder, error.strerror)
        ) from error


def require_disk(free_bytes, needed):
    """Raise SetupError if fewer bytes are free than the packages take."""
    if free_bytes < needed:
        raise SetupError(
            "%.1f GB are free here and about %d GB are needed; make room, or move the folder to a "
            "larger disk" % (free_bytes / GB, needed // GB)
        )


def require_own(venv):
    """Raise SetupError if there is something at ``venv`` that this script did not make."""
    found = None
    if os.path.isdir(venv):
        if os.listdir(venv) and not os.path.exists(os.path.join(venv, "ready.txt")):
            found = "a folder that this setup did not make"
    elif os.path.islink(venv):
        found = "a link to %s, which is not there" % os.readlink(venv)
    elif os.path.exists(venv):
        found = "a file"
    if found:
        raise SetupError(
            "%s is %s, and it stays as it is; the course needs that name for its environment. "
            "Rename or remove it, then run the same again" % (venv, found)
        )


def require_wheels(folder):
    """Raise SetupError if a folder has no wheels, or has those of another kind of machine."""
    try:
        with open(os.path.join(folder, WHEELS_NOTE), encoding="utf-8") as file:
            made_for = file.read().strip()
    except OSError as error:
        raise SetupError(
            "%s has no wheels of this course (%s); make wheels makes such a folder, on a machine "
            "with a network" % (folder, error.strerror)
        ) from error
    here = machine_of(sys.executable)
    if made_for != here:
        raise SetupError(
            "the wheels in %s are for %s, and this is %s; name that Python, as in: make lab "
            "PYTHON=python3.13, or make a folder on a machine of this kind"
            % (folder, made_for, here)
        )


def wanted_stamp():
    """A text that changes when the packages or JupyterLab's settings change."""
    wanted = json.dumps([requirements(), LAB_SETTINGS, LAB_DISABLED])
    return "wanted %s\n" % hashlib.sha256(wanted.encode()).hexdigest()


def problem(venv, stamp, version=None):
    """Why the environment cannot be used as it is, or "" if it can.

    ``version`` is the (major, minor) that its Python must have; None allows any.
    """
    require_own(venv)
    try:
        with open(os.path.join(venv, "ready.txt"), encoding="utf-8") as file:
            ready = file.read()
    except OSError:
        return "missing"
    if ready == UNFINISHED:
        return "half-made"
    # Once more packages are wanted, they are missing, and what is there is still good.
    names = dependencies() if ready == stamp else dependencies()[-1:]
    command = [python_of(venv), "-I", "-c", EXAMINE, ROOT, *names]
    try:
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return "broken"
    major, minor, place = done.stdout.decode().split()
    if place != "here":
        if os.path.islink(venv):
            raise SetupError(
                "%s is a link to the environment of another folder (%s), which stays as it is; "
                "remove the link, then run the same again" % (venv, os.path.realpath(venv))
            )
        return "that of another folder"
    if version and (int(major), int(minor)) != tuple(version):
        return "one of Python %s.%s" % (major, minor)
    return "" if ready == stamp else "outdated"


def requirements(extra=None):
    """The course's packages in pyproject.toml, with their versions; or those of one of its extras."""
    if not extra:
        return requirements("dependencies") + requirements("course")
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        text = file.read()
    listed = re.search(r"^%s = \[(.*?)\]$" % extra, text, re.DOTALL | re.MULTILINE)
    if not listed:
        raise SetupError("pyproject.toml has no packages named %s" % extra)
    return re.findall(r'"(.*?)"', listed.group(1))


def dependencies(extra=None):
    """Names of the packages in pyproject.toml, the course itself last; or those of an extra."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        own = re.search(r'^name = "(.*)"', file.read(), re.MULTILINE).group(1)
    names = [re.match(r"[A-Za-z0-9_.-]+", wanted).group() for wanted in requirements(extra)]
    return names if extra else [*names, own]


def python_of(venv):
    """The interpreter inside an environment."""
    windows = platform.system() == "Windows"
    return os.path.join(venv, *(("Scripts", "python.exe") if windows else ("bin", "python")))


def make(found, builds, wheels=None):
    """Make the environment anew, or bring an outdated one up to date, and install the course."""
    print("setup: the environment .venv is %s." % found, flush=True)
    require_python(sys.version_info[:3])
    require_writable(VENV if os.path.isdir(VENV) else ROOT)
    if found != "outdated":
        require_ensurepip()
        if found != "missing":
            write(os.path.join(VENV, "ready.txt"), UNFINISHED)
        empty(VENV)
        require_disk(shutil.disk_usage(VENV).free, builds.disk)
        write(os.path.join(VENV, "ready.txt"), UNFINISHED)
        # Started from the environment that was just emptied, only the Python below is left.
        below = getattr(sys, "_base_executable", sys.executable)
        run(
            [below, "-I", "-m", "venv", os.path.realpath(VENV)],
            "the environment could not be made, see above",
        )
    if builds.why:
        print("setup: PyTorch comes %s." % builds.why)
    if wheels:
        print("setup: taking the packages from %s; nothing is downloaded." % wheels)
    else:
        print(
            "setup: downloading about %s, once; this takes %s minutes."
            % (builds.download, builds.minutes)
        )
    print("setup: all packages go into .venv in this folder.", flush=True)
    started = time.time()
    install(python_of(VENV), VENV, builds, wheels)
    write(os.path.join(VENV, "ready.txt"), wanted_stamp())
    print("setup: done in %d s." % (time.time() - started), flush=True)


def empty(folder):
    """Make a folder, or remove all but ready.txt from it; it may be a link to elsewhere."""
    os.makedirs(folder, exist_ok=True)
    for name in set(os.listdir(folder)) - {"ready.txt"}:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)


def write(path, text):
    """Write a text file, and the folders above it if they are missing."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def install(python, prefix, builds, wheels=None):
    """Install the course and its packages with ``python`` into its environment, at ``prefix``."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-user"]
    command.append("--target=")
    if wheels:
        command += ["--no-index", "--find-links", os.path.abspath(wheels)]
    elif builds.index:
        # 2.15.0+cpu counts as newer than PyPI's 2.15.0. What follows finds torch in place.
        run([*command, "--extra-index-url", builds.index, *of_torch()], why_failed)
    run([*command, "--editable", ROOT + "[course]"], why_failed)
    write(
        os.path.join(prefix, "share", "jupyter", "lab", "settings", "overrides.json"),
        json.dumps(LAB_SETTINGS),
    )
    write(
        os.path.join(prefix, "etc", "jupyter", "labconfig", "page_config.json"),
        json.dumps({"disabledExtensions": LAB_DISABLED}),
    )


def of_torch():
    """The requirements that PyTorch's own index has."""
    return [text for text in requirements() if re.match(r"torch(vision)?\b", text)]


def save_wheels(folder, builds):
    """Put wheels of all that the course needs into a folder, for machines like this one."""
    folder = os.path.abspath(folder)
    os.makedirs(folder, exist_ok=True)
    require_writable(folder)
    print("setup: downloading about %s into %s." % (builds.download, folder), flush=True)
    if builds.why:
        print("setup: PyTorch comes %s." % builds.why, flush=True)
    command = [python_of(VENV), "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command += ["--wheel-dir", folder, "--find-links", folder]
    if builds.index:
        run([*command, "--extra-index-url", builds.index, *of_torch()], why_failed)
    # The last two build the course's own entry, which needs no network then.
    run([*command, *requirements(), "hatchling", "editables"], why_failed)
    write(os.path.join(folder, WHEELS_NOTE), machine_of(python_of(VENV)) + "\n")
    print("setup: done. Elsewhere, without a network: make lab WHEELS=folder", flush=True)


def add(extra):
    """Install the packages of one of pyproject.toml's extras, if any of them is missing."""
    script = "import sys, importlib.metadata as m\nfor name in sys.argv[1:]: m.version(name)"
    command = [python_of(VENV), "-I", "-c", script, *dependencies(extra)]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        print("setup: installing %s." % ", ".join(dependencies(extra)), flush=True)
        command = [python_of(VENV), "-m", "pip", "install", "--quiet", "--no-user", "--target="]
        run([*command, "--disable-pip-version-check", *requirements(extra)], why_failed)


def why_failed():
    """Why pip failed, as far as can be seen from here, and what to do."""
    free = shutil.disk_usage(VENV if os.path.isdir(VENV) else ROOT).free
    if free < GB // 4:
        return "the disk is full (%.2f GB are free); make room, then run the same again" % (
            free / GB
        )
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        if os.environ.get(name):
            # Without the user's name and password, which may stand before the host.
            proxy = urllib.parse.urlsplit(os.environ[name]).netloc.rpartition("@")[2]
            return (
                "installing failed, see above; check the network and the proxy %s, which %s names, "
                "then run the same again" % (proxy or os.environ[name], name)
            )
    return "installing failed, see above; check the network, then run the same again"


def run(command, sentence):
    """Run a command; SetupError with ``sentence``, a text or a function of none, if it fails."""
    # pip unpacks gigabytes into the temporary folder; a small one elsewhere must not matter.
    with tempfile.TemporaryDirectory(dir=VENV if os.path.isdir(VENV) else None) as scratch:
        kept = {name: text for name, text in os.environ.items() if name not in LEFT_ASIDE}
        try:
            failed = subprocess.run(command, env=dict(kept, TMPDIR=scratch)).returncode
        except OSError as error:
            raise SetupError("%s cannot be started: %s" % (command[0], error)) from error
    if failed:
        raise SetupError(sentence() if callable(sentence) else sentence)


if __name__ == "__main__":
    main()
