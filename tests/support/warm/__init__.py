"""Programs from a process that has done its imports: there in a tenth of a second.

``run``, for tests of ``python -m MODULE`` itself: Python starts once for each module. It imports what
takes seconds, and for each call a fork of it goes on with Python's own way of running a module, with
the call's arguments, folder, variables and streams.

``run_forked``, for tests of what a module or a script does, and ``fork`` under it: a fork, like a
rank, of what has imported torch for ``launch.run``.

That a program starts without help is for another test to try.
"""

import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing
import multiprocessing.process
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np

from teaching.lessons import ROOT
from vgpu.launch import forkserver

HURRIED = """
import ctypes, gc, os
gc.disable()
libc = ctypes.CDLL(None) if os.name == "posix" else None
if hasattr(libc, "on_exit"):
    libc.on_exit(libc._exit, None)
"""
_SOCKET, _IMPORTS = "WARM_TEST_SOCKET", "WARM_TEST_IMPORTS"


def run(module, arguments, *, imports, cwd, environment, typed=""):
    """``subprocess.run`` of ``python -m module arguments``, with its streams as text.

    ``imports`` names what has been imported, in one string; the module's own ``__main__`` is not
    among it. ``typed`` is what it reads from its standard input.
    """
    server = _server(module, imports)
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(typed)
        files[0].seek(0)
        request = {"arguments": [*map(str, arguments)], "cwd": str(cwd), "environment": environment}
        message = json.dumps(request).encode() + b"\n"
        socket.send_fds(server, [message], [file.fileno() for file in files])
        code = server.recv(20)
        assert code, f"the process that runs {module} has ended"
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(arguments, int(code), files[1].read(), files[2].read())


@cache
def _server(module, imports):
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    # Python imports this one as it starts, before it looks at what it is to run.
    Path(folder.name, "sitecustomize.py").write_text("import warm\nwarm.serve()\n")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            pass_fds=[theirs.fileno()],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(
                    [folder.name, str(Path(__file__).parents[1]), str(ROOT)]
                ),
                "OMP_NUM_THREADS": "1",
                _SOCKET: str(theirs.fileno()),
                _IMPORTS: imports,
            },
        )

    def end():
        ours.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return ours


def serve():
    """Answer each request with its exit status; return where Python is to go on with one."""
    atexit.register(_say_no_more)
    for name in os.environ[_IMPORTS].split():
        importlib.import_module(name)
    # A fork leaves out of its collections what it was forked with, garbage too.
    gc.freeze()
    gc.enable()
    server = socket.socket(fileno=int(os.environ[_SOCKET]))
    while True:
        message, streams, *_ = socket.recv_fds(server, 1 << 16, 3)
        while message and not message.endswith(b"\n"):
            message += server.recv(1 << 16)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            server.close()
            _become(json.loads(message), streams)
            return
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        server.send(str(os.waitstatus_to_exitcode(status)).encode())


def _say_no_more():
    """The last thing before Python takes itself down: C++ would report all that was frozen as lost."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _become(request, streams):
    # C++ would take torch down after Python has ended: half of a short run's time.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = [folder for folder in sys.path if folder not in _own_folders()]
    sys.argv[1:] = request["arguments"]
    _renew()


def _renew():
    if torch := sys.modules.get("torch"):
        torch.ones((), requires_grad=True).sin()  # see vgpu.launch.rank.renew_autograd
    # A forked process repeats the random numbers of the one it comes from.
    random.seed()
    np.random.seed()


def _own_folders():
    return str(Path(__file__).parents[1]), os.path.dirname(sys.modules["sitecustomize"].__file__)


def run_forked(program, *arguments, cwd=None):
    """``subprocess.run`` of a script, or of the module of a name, with its output and errors."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start_forked(program, *arguments, output=output, errors=errors, cwd=cwd)
        process.join()
        return subprocess.CompletedProcess(
            [program, *arguments], process.exitcode, output.read_text(), errors.read_text()
        )


def start_forked(program, *arguments, output, errors, cwd=None, network=None, **environment):
    """The same, begun: a process of multiprocessing's, which writes into files or to a terminal.

    ``network`` names a namespace of ``ip netns`` for it to be in; the environment is this process's
    and what is given.
    """
    return fork(
        _run_program,
        (program, [*map(str, arguments)], (output, errors), network),
        cwd=cwd or os.getcwd(),
        environment={**os.environ, **environment},
    )


def fork(function, arguments, *, cwd, environment):
    """Begin a process of multiprocessing's that calls the function, and is otherwise like a new one."""
    process = forkserver.context().Process(
        target=_begin, args=(function, arguments, cwd, environment)
    )
    with forkserver.main_module_hidden():
        process.start()
    return process


def _begin(function, arguments, cwd, environment):
    os.chdir(cwd)
    multiprocessing.process.ORIGINAL_DIR = str(cwd)  # which "" of sys.path is for its children
    os.environ.clear()
    os.environ.update(environment)
    # What it starts itself is started in the usual way, not as this process was, and a forkserver of
    # its own, which removes multiprocessing's folder when it ends, has one of its own.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process()._config.pop("tempdir", None)
    _renew()
    function(*arguments)


def _run_program(program, arguments, streams, network):
    for number, path in enumerate(streams, start=1):
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOCTTY", 0)
        stream = os.open(path, how)
        os.dup2(stream, number)
        os.close(stream)
    if network is not None:
        _enter(network)
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _enter(network):
    """As ``ip netns exec``; Python itself can do it from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")


def hurried(folder):
    """A variable for processes that import torch, do little and end: a quarter less time for each.

    They look for no garbage, and end with Python, before C++ would take torch down. ``folder`` is
    made for what they read at their start.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HURRIED)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}
