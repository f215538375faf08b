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

from vgpu import cuda_is_vgpu
from vgpu.backend import enable
from vgpu.collectives.dispatch import tally
from vgpu.memory import gpus
from vgpu.torch_patches import device_module, flash_attn
from vgpu.units import format_bytes


@dataclass(frozen=True)
class ProgramSettings:
    """What the program runs with; the processes that it starts get the same."""

    count: int
    gpu: str = "V100"
    memory_bytes: int | None = None
    seed: int | None = None
    cuda_folder: str | None = None
    """In files below it, ``cuda`` means ``vgpu``; None without ``--cuda-is-vgpu``."""
    summary: bool = False

    def prepare(self) -> None:
        """Enable the virtual GPUs, and let ``cuda`` mean ``vgpu`` where that is wanted."""
        enable(self.count, self.gpu, self.memory_bytes)
        if self.seed is not None:
            torch.manual_seed(self.seed)
        if self.cuda_folder is not None:
            cuda_is_vgpu.install(self.cuda_folder)
            flash_attn.stand_in()
            _let_grad_scaler_default_to_vgpu()


def _let_grad_scaler_default_to_vgpu() -> None:
    """``torch.amp.GradScaler()`` and its subclasses are for "cuda" by default."""
    plain = torch.amp.GradScaler.__init__

    @functools.wraps(plain)
    def init(self: torch.amp.GradScaler, device: str = "cuda", *args: Any, **options: Any) -> None:
        plain(self, cuda_is_vgpu.replace_name(device), *args, **options)

    torch.amp.GradScaler.__init__ = init  # type: ignore[method-assign]


def run_script(path: Path, settings: ProgramSettings) -> None:
    """Run a file as ``__main__``; it ends as the file ends, with its exception or SystemExit."""
    sys.excepthook = _show_own_frames
    source, filename = path.read_bytes(), os.path.abspath(path)
    _put_first_in_path(str(path.resolve().parent))
    _start(settings)
    main = ModuleType("__main__")
    main.__file__ = filename
    main.__loader__ = SourceFileLoader("__main__", filename)
    sys.modules["__main__"] = main
    exec(_code(source, filename, settings), vars(main))


def run_module(name: str, settings: ProgramSettings) -> None:
    """Run a module, or a package's ``__main__``, as ``python -m`` does.

    ModuleNotFoundError where there is none.
    """
    sys.excepthook = _show_own_frames
    _put_first_in_path(os.getcwd())
    _start(settings)
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _put_first_in_path(folder: str) -> None:
    """Put a folder where Python puts the script's, unless ``python -P`` asked for none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _code(source: bytes, filename: str, settings: ProgramSettings) -> CodeType:
    try:
        if settings.cuda_folder is None:
            return compile(source, filename, "exec", dont_inherit=True)
        return cuda_is_vgpu.compile_source(source, filename)
    except SyntaxError as error:
        raise error.with_traceback(None) from None


_OUR_FILES = (__file__, os.path.join(os.path.dirname(__file__), "__main__.py"), "<frozen runpy>")


def _show_own_frames(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print a traceback as ``python script.py`` does, without the frames that started the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OUR_FILES:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.__excepthook__(kind, error, traceback)


def _start(settings: ProgramSettings) -> None:
    settings.prepare()
    plain = multiprocessing.spawn.get_preparation_data

    def with_virtual_gpus(name: str) -> dict[str, Any]:
        return {**plain(name), "virtual_gpus": _ForChild(settings)}

    multiprocessing.spawn.get_preparation_data = with_virtual_gpus
    if settings.summary:
        util.Finalize(None, show_summary, exitpriority=-1)


class _ForChild:
    """A part of multiprocessing's preparation data; a new process starts up by unpickling it."""

    def __init__(self, settings: ProgramSettings) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        return _start_in_child, (self._settings,)


def _start_in_child(settings: ProgramSettings) -> None:
    _start(settings)
    if settings.cuda_folder is not None:
        multiprocessing.spawn._fixup_main_from_path = _run_main_again  # type: ignore[attr-defined]


def _run_main_again(path: str) -> None:
    """Run the parent's script again, as multiprocessing does, but with ``cuda`` as ``vgpu``."""
    main = ModuleType("__mp_main__")
    main.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(cuda_is_vgpu.compile_source(Path(path).read_bytes(), path), vars(main))


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
