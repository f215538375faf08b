"""torchrun from a cell: its own agent, and ranks that need not import torch anew.

The command ``torchrun`` is an agent, ``elastic_launch``, which starts a host's ranks, watches over
them, and starts all of them again when it loses one. Here the agent runs in this process, and its
ranks are forked from the process that also serves ``launch.run``. Started as programs, each would
import torch for some seconds, and again after every restart.
"""

import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from helpers.shell import Result
from vgpu import torch_releases
from vgpu.launch.forkserver import context, main_module_hidden
from vgpu.launch.rank import as_if_fresh


def torchrun(line: str) -> Result:
    """Do what this line would do in a shell: ``torchrun --max-restarts=1 ... -m module arguments``.

    It runs on this host alone, and the program is a module. The result's status is 0 if all ranks
    ended well in the end; its output and errors are what the ranks have written, start by start
    and rank by rank. What torch logs about it here comes last in the errors. Raises ValueError for
    another kind of line.
    """
    name, *arguments = shlex.split(line)
    options = run.parse_args(arguments)
    if name != "torchrun" or not options.module or options.nnodes not in ("1", "1:1"):
        raise ValueError(
            f"expected torchrun ... -m module ..., on one host; found {line!r}. "
            "helpers.shell.run_lines runs any line."
        )
    # As --standalone has it: a free port, and a name that no other run has.
    options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
    options.rdzv_id = uuid.uuid4().hex
    options.start_method, options.redirects = context().get_start_method(), "3"
    # torchrun's own default, set beforehand: otherwise it warns of it in the cell.
    environment, log = {"OMP_NUM_THREADS": "1", **os.environ}, StringIO()
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs, _as_it_was():
        options.log_dir = logs
        os.environ.update(environment)
        config, _, _ = run.config_from_args(options)
        program = options.training_script, options.training_script_args
        try:
            with main_module_hidden(), torch_releases.redirect_stderr(log):
                elastic_launch(config, _become)(*program, environment)
            status = 0
        except ChildFailedError as error:
            status = max(failure.exitcode for failure in error.failures.values())
        output, errors = (_written(Path(logs), f"{name}.log") for name in ("stdout", "stderr"))
    return Result(line, status, output.strip(), (errors + log.getvalue()).strip())


def _become(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    """On a rank: what ``python -m module arguments`` does."""
    # The process that it was forked from has the environment of an earlier moment, and multiprocessing
    # is set to start others as this one was started.
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)
    as_if_fresh()
    # A shell's background jobs ignore Ctrl-C, and what they start inherits that: a rank would sit
    # out the half minute that the agent gives it to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_follow_parent, daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _follow_parent() -> None:
    """Children of a forkserver would outlive a kernel that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _written(logs: Path, name: str) -> str:
    """What the ranks have written; their files are RUN/attempt_0/RANK/stdout.log and so on."""
    files = sorted(
        logs.glob(f"*/attempt_*/*/{name}"), key=lambda f: [_number(p) for p in f.parts[-3:-1]]
    )
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _number(part: str) -> int:
    return int(part.removeprefix("attempt_"))


@contextmanager
def _as_it_was() -> Iterator[None]:
    """The agent takes a process for its own: it sets variables, and handlers of signals."""
    environment = dict(os.environ)
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    except SignalException as stopped:
        if stopped.sigval != signal.SIGINT:
            raise
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
