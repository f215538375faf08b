"""Gives the run's virtual GPUs to every Python process that the run starts.

Python imports this file at startup if its folder is in PYTHONPATH. Launchers such as torchrun and
accelerate start their ranks as ``python script.py``, which becomes ``python -m vgpu [options]
script.py``. This file must not import torch, or anything else that takes time.
"""

import importlib.machinery
import importlib.util
import os
import shlex
import sys

# Processes that don't run a user's program: multiprocessing's own, whose children get the virtual
# GPUs with their preparation data; pytest-xdist's workers, which have the plugin; and this package.
_COMMANDS = ("from multiprocessing", "import sys;exec(eval(sys.stdin.readline()))")
_MODULES = ("vgpu", "pip", "ensurepip", "venv", "torch._inductor")


def run_with_virtual_gpus() -> None:
    """Become ``python -m vgpu ...`` if this Python runs a script, a module or a command."""
    options = os.environ.get("VGPU_OPTIONS")
    flags, program = split(sys.orig_argv)
    if options is None or not program or not is_wanted(program):
        return
    command = [sys.executable, *flags, "-m", "vgpu", *shlex.split(options), *program]
    if os.name == "nt":  # on Windows, exec doesn't keep the process
        import subprocess

        os._exit(subprocess.call(command))
    os.execv(sys.executable, command)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return Python's own options, and the program.

    The program is ``["-m", name, ...]``, ``["-c", text, ...]`` or a script, or empty if Python
    reads it from standard input.
    """
    flags: list[str] = []
    rest = arguments[1:]
    while rest:
        first = rest.pop(0)
        if first == "-":
            return flags, []
        if not first.startswith("-"):
            return flags, [first, *rest]
        if first.startswith("--"):
            flags.append(first)
            if first == "--check-hash-based-pycs" and rest:
                flags.append(rest.pop(0))
            continue
        # Letters may be combined: -um module, -Wignore, -W ignore.
        for at, letter in enumerate(first[1:], 1):
            if letter in "cm":
                if at > 1:
                    flags.append(first[:at])
                value = [first[at + 1 :]] if first[at + 1 :] else []
                return flags, [f"-{letter}", *value, *rest]
            if letter in "WX":
                break
        flags.append(first)
        if first[-1] in "WX" and rest:
            flags.append(rest.pop(0))
    return flags, []


def is_wanted(program: list[str]) -> bool:
    if program[0] == "-c":
        return not any(command in program[1] for command in _COMMANDS)
    if program[0] == "-m":
        return not f"{program[1]}.".startswith(tuple(f"{name}." for name in _MODULES))
    return os.path.join("torch", "_inductor") not in program[0]


def import_the_hidden_one() -> None:
    """Import the sitecustomize module that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    run_with_virtual_gpus()
    import_the_hidden_one()
