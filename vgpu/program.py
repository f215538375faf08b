"""Runs a script or module with virtual GPUs, and lets the processes that it starts have them too.

What ``python script.py`` sees is kept: ``__main__`` is the script, ``sys.argv`` and ``sys.path``
are its own, and processes that multiprocessing starts find it.
"""

import functools
import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import torch

from vgpu import cuda_words
from vgpu.backend import enable
from vgpu.collectives.dispatch import tally
from vgpu.memory import gpus
from vgpu.torch_patches import device_module
from vgpu.units import format_bytes


@dataclass(frozen=True)
class Setting:
    """What the program runs with; its processes get the same."""

    count: int
    gpu: str = "V100"
    memory_bytes: int | None = None
    seed: int | None = None
    cuda_folder: str | None = None
    """Below it ``cuda`` is read as ``vgpu``; None where it is not."""
    summary: bool = False

    def prepare(self) -> None:
        """Enable the virtual GPUs, and read ``cuda`` as ``vgpu`` where that is wanted."""
        enable(self.count, self.gpu, self.memory_bytes)
        if self.seed is not None:
            torch.manual_seed(self.seed)
        if self.cuda_folder is not None:
            cuda_words.install(self.cuda_folder)
            _scale_on_virtual_gpus()


def _scale_on_virtual_gpus() -> None:
    """``torch.amp.GradScaler()`` is for "cuda" where nothing is said; so are its subclasses."""
    plain = torch.amp.GradScaler.__init__

    @functools.wraps(plain)
    def init(self: torch.amp.GradScaler, device: str = "cuda", *args: Any, **options: Any) -> None:
        plain(self, cuda_words.word(device), *args, **options)

    torch.amp.GradScaler.__init__ = init  # type: ignore[method-assign]


def run_script(path: Path, setting: Setting) -> None:
    """Run a file as ``__main__``; it ends as the file ends, with its exception or SystemExit."""
    sys.excepthook = _show_from_program
    source, filename = path.read_bytes(), os.path.abspath(path)
    _look_first_in(str(path.resolve().parent))
    _start(setting)
    main = ModuleType("__main__")
    main.__file__ = filename
    main.__loader__ = SourceFileLoader("__main__", filename)
    sys.modules["__main__"] = main
    exec(_code(source, filename, setting), vars(main))


def run_module(name: str, setting: Setting) -> None:
    """Run a module, or a package's ``__main__``, as ``python -m`` does.

    ModuleNotFoundError where there is none.
    """
    sys.excepthook = _show_from_program
    _look_first_in(os.getcwd())
    _start(setting)
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _look_first_in(folder: str) -> None:
    """Put a folder where Python puts the script's, unless ``python -P`` asked for none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _code(source: bytes, filename: str, setting: Setting) -> CodeType:
    try:
        if setting.cuda_folder is None:
            return compile(source, filename, "exec", dont_inherit=True)
        return cuda_words.compiled(source, filename)
    except SyntaxError as error:
        raise error.with_traceback(None) from None


_OURS = (__file__, os.path.join(os.path.dirname(__file__), "__main__.py"), "<frozen runpy>")


def _show_from_program(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """The program's own frames, as ``python script.py`` shows them, without those that started it."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OURS:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.__excepthook__(kind, error, traceback)


def _start(setting: Setting) -> None:
    setting.prepare()
    plain = multiprocessing.spawn.get_preparation_data

    def with_virtual_gpus(name: str) -> dict[str, Any]:
        return {**plain(name), "virtual_gpus": _ForChild(setting)}

    multiprocessing.spawn.get_preparation_data = with_virtual_gpus
    if setting.summary:
        util.Finalize(None, show_summary, exitpriority=-1)


class _ForChild:
    """Travels in what multiprocessing tells a new process first; unpickling it prepares there."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._setting,)


def _arrive(setting: Setting) -> None:
    _start(setting)
    if setting.cuda_folder is not None:
        multiprocessing.spawn._fixup_main_from_path = _read_main  # type: ignore[attr-defined]


def _read_main(path: str) -> None:
    """Run the parent's script once more, as multiprocessing does, but read for virtual GPUs."""
    main = ModuleType("__mp_main__")
    main.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(cuda_words.compiled(Path(path).read_bytes(), path), vars(main))


def summary() -> str:
    """Peak bytes of each GPU that this process used, and its collectives; a line each."""
    lines = []
    for index in range(gpus.device_count()):
        gpu = gpus.by_index(index)
        if gpu.memory.allocation_count:
            peak = format_bytes(device_module.max_memory_allocated(index))
            of = format_bytes(gpu.memory.capacity_bytes)
            lines.append(f"{gpu.device} ({gpu.spec.name}): at most {peak} of {of} allocated")
    for name, calls in sorted(tally.calls.items()):
        lines.append(f"{name}: {calls} calls, {format_bytes(tally.bytes[name])} put in")
    rank = os.environ.get("RANK")
    who = f"rank {rank}: " if rank is not None else ""
    return "\n".join(who + line for line in lines or ["no virtual GPU was used"])


def show_summary() -> None:
    """Print the summary in one piece, so that several ranks' lines do not mix."""
    sys.stdout.flush()
    sys.stderr.write(summary() + "\n")
    sys.stderr.flush()
