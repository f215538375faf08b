"""Which builds of PyTorch the set-up takes: with CUDA, or for the CPU alone, which are far smaller.

On Linux PyPI's torch brings the CUDA libraries along. A machine without an NVIDIA driver has no use
for them, so there the builds of PyTorch's own index are taken, as long as it answers. On macOS and
Windows PyPI's builds are without CUDA. Python 3.6 must be able to read this file (setup_venv.py).
"""

import collections
import os
import platform
import shutil
import subprocess
import threading
import urllib.request

GB = 1000**3
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 4
"""How long the index may take to answer before PyPI's builds are taken instead."""

Builds = collections.namedtuple("Builds", "index download minutes disk why")
"""``index`` is the address that pip asks for torch besides its usual one, or None. ``download`` and
``minutes`` are texts, ``disk`` the most bytes that .venv holds meanwhile; measured with torch 2.15
on Linux x86-64. ``why`` says why these, or is empty where there was no choice."""

SMALL = ("0.5 GB", "1 to 5", 3 * GB)
LARGE = ("2.7 GB", "3 to 15", 10 * GB)


def choose(cpu, cuda, driver=None, answers=None):
    """The builds for this machine; ``cpu`` and ``cuda`` are the user's word, at most one of them.

    ``driver()`` says whether there is an NVIDIA driver, ``answers(address)`` whether an index is
    within reach; by default both look for themselves.
    """
    if platform.system() != "Linux":
        return Builds(None, *SMALL, why="")
    if cuda:
        return Builds(None, *LARGE, why="with CUDA, as CUDA=1 says")
    if cpu:
        return Builds(CPU_INDEX, *SMALL, why="without CUDA, as CPU=1 says")
    if (driver or has_nvidia_driver)():
        return Builds(None, *LARGE, why="with CUDA, since this machine has an NVIDIA driver")
    if (answers or is_within_reach)(CPU_INDEX):
        return Builds(
            CPU_INDEX, *SMALL,
            why="without CUDA, since this machine has no NVIDIA driver; CUDA=1 takes the others",
        )  # fmt: skip
    return Builds(
        None, *LARGE,
        why="from PyPI, with CUDA: this machine has no NVIDIA driver, but PyTorch's own index, "
        "which has smaller ones, did not answer within %d s; CPU=1 insists on it" % PATIENCE_S,
    )  # fmt: skip


def has_nvidia_driver():
    """Whether this Linux has an NVIDIA driver, be it that of Windows below it (WSL)."""
    places = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/nvidia-smi")
    return shutil.which("nvidia-smi") is not None or any(map(os.path.exists, places))


def is_within_reach(address):
    """Whether an index of packages has torch and says so within PATIENCE_S, a slow DNS included."""
    found = []

    def ask():
        try:
            with urllib.request.urlopen(address + "/torch/", timeout=PATIENCE_S) as answer:
                found.append(answer.status == 200)
        except (OSError, ValueError):
            found.append(False)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return found == [True]


def machine_of(python):
    """What the wheels for an interpreter are made for: system, processor and Python, in words."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.check_output([python, "-I", "-c", script]).decode().strip()
    return "%s %s, Python %s" % (platform.system(), platform.machine(), version)
