"""Runs a script or module, and the processes that it starts, with virtual GPUs.

The program sees what it would see under ``python script.py``: ``__main__`` is the script,
``sys.argv`` and ``sys.path`` are its own, and processes started by multiprocessing find the script.
"""

import functools
import importlib.util
import json
import multiprocessing.spawn
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import torch

from vgpu import cuda_is_vgpu
from vgpu.backend import enable, is_enabled
from vgpu.collectives.cluster import predict_second_step
from vgpu.collectives.dispatch import tally
from vgpu.memory import gpus
from vgpu.torch_patches import attention, device_module
from vgpu.units import format_bytes

# The report at the end: whether the run used virtual GPUs, and where ``cuda`` was replaced
#
# A run may have many processes, such as a launcher, its ranks and their workers. The first one
# creates a file and names it in the environment; every process adds a line when it exits, and the
# first one reads them all.


_FILE = "VGPU_RUN_FILE"

asked_cuda: set[str] = set()
"""Packages that asked torch for CUDA GPUs, and were told that there are none."""


@dataclass
class Report:
    """The combined report of a run's processes."""

    used: bool = False
    """Whether anything was put on a virtual GPU."""
    asked: set[str] = field(default_factory=set)
    lines: dict[str, None] = field(default_factory=dict)
    """Descriptions of the words replaced in each of the program's files; a dict keeps the order."""
    packages: dict[str, int] = field(default_factory=dict)
    """For each installed package, the number of files in which words were replaced."""

    def add(self, used: bool, asked: list[str], lines: list[str], packages: dict[str, int]) -> None:
        self.used |= used
        self.asked |= set(asked)
        self.lines |= dict.fromkeys(lines)
        for name, count in packages.items():
            self.packages[name] = max(count, self.packages.get(name, 0))

    def replaced(self) -> list[str]:
        found = list(self.lines)
        if self.packages:
            files = (f"{name} (files: {count})" for name, count in sorted(self.packages.items()))
            found.append(f"reads cuda as {gpus.DEVICE_TYPE} in packages: {', '.join(files)}")
        return found

    def unused(self, cuda_is_vgpu: bool) -> str | None:
        """Return why no virtual GPU was used, as far as is known, or None if one was used."""
        if self.used:
            return None
        advice = "add --read {}" if cuda_is_vgpu else "add --cuda-is-vgpu"
        who = sorted(self.asked - {"__main__"}) or sorted(self.asked)
        if not who:
            return "no virtual GPU was used: nothing was put on one"
        name = who[0].replace("__main__", "the program")
        return (
            f"no virtual GPU was used: {name} asked for CUDA and found none; "
            f"{advice.format(name)} to let it find the virtual GPUs"
        )


def begin() -> None:
    """Make this process add its line when it exits, and note which packages ask for CUDA."""
    for name in ("is_available", "device_count"):
        setattr(torch.cuda, name, _noting_who_asks(getattr(torch.cuda, name)))
    if not is_first_process():
        _at_exit()
    else:
        handle, os.environ[_FILE] = tempfile.mkstemp(prefix="vgpu-run-")
        os.close(handle)
    # multiprocessing drops atexit handlers in the processes that it forks.
    util.register_after_fork(begin, lambda _: _at_exit())


def is_first_process() -> bool:
    """Whether no process of the run has called ``begin`` yet."""
    return _FILE not in os.environ


def _noting_who_asks(plain: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(plain)
    def noting() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller != "torch":
            asked_cuda.add(caller)
        return plain()

    return noting


def _at_exit() -> None:
    util.Finalize(None, _add_line, exitpriority=-2)


def _add_line() -> None:
    if not os.path.exists(os.environ[_FILE]):
        return  # the first process exited before this one
    with open(os.environ[_FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(_of_this_process()) + "\n")


def _of_this_process() -> dict[str, Any]:
    lines, packages = cuda_is_vgpu.replaced()
    used = any(gpus.by_index(i).memory.allocation_count for i in range(gpus.device_count()))
    return {"used": used, "asked": sorted(asked_cuda), "lines": lines, "packages": packages}


def end() -> Report:
    """Return the combined report; called in the first process, when the program ends."""
    report = Report()
    report.add(**_of_this_process())
    file = Path(os.environ[_FILE])
    for line in file.read_text(encoding="utf-8").splitlines():
        report.add(**json.loads(line))
    file.unlink()
    return report


def summary() -> str:
    """Return a line for each GPU that this process used, with its peak, and for each collective."""
    lines = []
    for index in range(gpus.device_count()):
        gpu = gpus.by_index(index)
        if gpu.memory.allocation_count:
            peak = format_bytes(device_module.max_memory_allocated(index))
            of = format_bytes(gpu.memory.capacity_bytes)
            lines.append(f"{gpu.device} ({gpu.spec.name}): at most {peak} of {of} allocated")
    for name, calls in sorted(tally.calls.items()):
        lines.append(f"{name}: {calls} calls, {format_bytes(tally.bytes[name])} of input")
    rank = os.environ.get("RANK")
    who = f"rank {rank}: " if rank is not None else ""
    return "\n".join(who + line for line in lines or ["no virtual GPU was used"])


def show_summary() -> None:
    """Print the summary with a single write, so that different ranks' lines aren't interleaved."""
    sys.stdout.flush()
    sys.stderr.write(summary() + "\n")
    sys.stderr.flush()


# The run


@dataclass(frozen=True)
class ProgramSettings:
    """The settings for the program and for the processes that it starts."""

    count: int
    gpu: str = "V100"
    memory_bytes: int | None = None
    seed: int | None = None
    cuda_is_vgpu: bool = False
    """Whether ``cuda`` means ``vgpu`` in the program's files and in packages that it imports."""
    read: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    """Names of packages and modules that override the choice of ``cuda_is_vgpu.Finder``."""
    summary: bool = False
    cluster: tuple[int, int] | None = None
    """Hosts and GPUs per host; the program is rank 0 until its second step is recorded."""
    network: str = "InfiniBand NDR"

    def prepare(self) -> None:
        """Enable the virtual GPUs in this process and in its children.

        With ``cuda_is_vgpu``, ``cuda`` means ``vgpu`` from then on.
        """
        enable(self.count, self.gpu, self.memory_bytes)
        if self.seed is not None:
            torch.manual_seed(self.seed)
        if self.cuda_is_vgpu:
            cuda_is_vgpu.install(self.read, self.not_read)
            attention.stand_in()
        self._let_children_have_them()
        begin()

    def place(self) -> AbstractContextManager[None]:
        """Return the context manager that the program runs in."""
        if self.cluster is None:
            return nullcontext()
        hosts, each = self.cluster
        return predict_second_step(
            hosts=hosts,
            gpus_per_host=each,
            gpu=self.gpu,
            network=self.network,
            memory_bytes=self.memory_bytes,
        )

    def options(self) -> list[str]:
        """Return the equivalent options of ``python -m vgpu``."""
        found = [f"--count={self.count}", f"--gpu={self.gpu}"]
        if self.memory_bytes is not None:
            found.append(f"--memory={self.memory_bytes}B")
        if self.seed is not None:
            found.append(f"--seed={self.seed}")
        found += ["--cuda-is-vgpu"] * self.cuda_is_vgpu + ["--summary"] * self.summary
        found += [f"--read={name}" for name in self.read]
        return found + [f"--not-read={name}" for name in self.not_read]

    def _let_children_have_them(self) -> None:
        """Put a folder with a sitecustomize.py, which Python runs at startup, on PYTHONPATH."""
        folder, ours = Path(__file__).parent / "for_children", Path(__file__).parents[1]
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        wanted = [str(folder), *filter(None, path), str(ours)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(wanted))
        os.environ[OPTIONS] = shlex.join(self.options())


OPTIONS = "VGPU_OPTIONS"
"""The environment variable that for_children/sitecustomize.py reads."""

PLAIN_ASSERTS = "--assert=plain"


def run_script(path: Path, settings: ProgramSettings) -> None:
    """Run a file as ``__main__``; its exceptions, including SystemExit, propagate."""
    filename = os.path.abspath(path)
    names = {"__file__": filename, "__loader__": SourceFileLoader("__main__", filename)}
    _run_source(path.read_bytes(), filename, settings, str(path.resolve().parent), names)


def run_module(name: str, settings: ProgramSettings) -> None:
    """Run a module, or a package's ``__main__``, as ``python -m`` does.

    Raises ModuleNotFoundError if the module doesn't exist.
    """
    sys.excepthook = _show_own_frames
    _put_first_in_path(os.getcwd())
    start(settings)
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if name.partition(".")[0] == "pytest" and settings.cuda_is_vgpu:
        # Otherwise, pytest itself would compile the tests, without replacing words.
        options = os.environ.get("PYTEST_ADDOPTS", "").split()
        os.environ["PYTEST_ADDOPTS"] = " ".join(dict.fromkeys([*options, PLAIN_ASSERTS]))
    with settings.place():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_command(source: str, settings: ProgramSettings) -> None:
    """Run a string as ``__main__``, as ``python -c`` does."""
    _run_source(source, "<string>", settings, "", {})


def _run_source(
    source: bytes | str,
    filename: str,
    settings: ProgramSettings,
    folder: str,
    names: dict[str, Any],
) -> None:
    """Run source code as ``__main__``, with ``folder`` first in the path and ``names`` defined."""
    sys.excepthook = _show_own_frames
    _put_first_in_path(folder)
    start(settings)
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(names)
    code = _code(source, filename, settings)
    with settings.place():
        exec(code, vars(main))


def _put_first_in_path(folder: str) -> None:
    """Put a folder where Python puts the script's folder, unless ``python -P`` prevents that."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _code(source: bytes | str, filename: str, settings: ProgramSettings) -> CodeType:
    try:
        if not settings.cuda_is_vgpu:
            return compile(source, filename, "exec", dont_inherit=True)
        return cuda_is_vgpu.compile_source(source, filename)
    except SyntaxError as error:
        raise error.with_traceback(None) from None


_OUR_FILES = (__file__, os.path.join(os.path.dirname(__file__), "__main__.py"), "<frozen runpy>")


def _show_own_frames(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print a traceback as ``python script.py`` does, without frames from before the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OUR_FILES:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.__excepthook__(kind, error, traceback)


def start(settings: ProgramSettings) -> None:
    """Prepare this process, and those that multiprocessing starts from it."""
    settings.prepare()
    plain = multiprocessing.spawn.get_preparation_data

    def with_virtual_gpus(name: str) -> dict[str, Any]:
        return {**plain(name), "virtual_gpus": _ForChild(settings)}

    multiprocessing.spawn.get_preparation_data = with_virtual_gpus
    if settings.summary:
        util.Finalize(None, show_summary, exitpriority=-1)


class _ForChild:
    """Part of multiprocessing's preparation data, which a new process unpickles when it starts."""

    def __init__(self, settings: ProgramSettings) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        return _start_in_child, (self._settings,)


def _start_in_child(settings: ProgramSettings) -> None:
    start(settings)
    if settings.cuda_is_vgpu:
        multiprocessing.spawn._fixup_main_from_path = _run_main_again  # type: ignore[attr-defined]


def _run_main_again(path: str) -> None:
    """Run the parent's script again, as multiprocessing does, but with ``cuda`` as ``vgpu``."""
    main = ModuleType("__mp_main__")
    main.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(cuda_is_vgpu.compile_source(Path(path).read_bytes(), path), vars(main))


def load_ipython_extension(shell: Any) -> None:
    """Run ``%load_ext vgpu``: from the next cell on, CUDA means virtual GPUs.

    This includes packages that are imported from then on. Unless ``vgpu.enable`` has been called,
    enables VGPU_COUNT virtual GPUs, or two if that isn't set.
    """
    if not is_enabled():
        enable(int(os.environ.get("VGPU_COUNT", "2")))
    cuda_is_vgpu.install()
    # An alias of torch, as in "import torch as th", is recognized in all later cells.
    replacer = cuda_is_vgpu.Replacer(cuda_is_vgpu.Replacements("<cell>"))
    shell.ast_transformers.append(replacer)


def unload_ipython_extension(shell: Any) -> None:
    """Run ``%unload_ext vgpu``; the virtual GPUs stay until ``vgpu.disable()``."""
    shell.ast_transformers[:] = (
        other for other in shell.ast_transformers if not isinstance(other, cuda_is_vgpu.Replacer)
    )
    cuda_is_vgpu.uninstall()
