"""Lessons' kernels from a process that has imported torch: four seconds of computing less for each.

Two are the kernel's own, two those of the forkserver that its ranks come from. The kernels are
processes such as ``launch.run`` starts, on systems that fork. ``pytest --nbmake notebooks`` alone
starts those that a learner gets, and so do CI's lessons.
"""

import atexit
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint
from unittest import mock

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

import warm
from helpers import forkserver
from helpers.forkserver import server

_NAME = "forked"
_IMPORT = "from multiprocessing.forkserver import main; "  # what multiprocessing has Python run


@contextmanager
def in_use():
    """The kernels that Jupyter's clients start in this process are forked, where that is possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        yield
        return
    factory = KernelProvisionerFactory.instance()
    factory.provisioners[_NAME] = EntryPoint(_NAME, f"{__name__}:ForkedKernel", factory.GROUP_NAME)
    before, factory.default_provisioner_name = factory.default_provisioner_name, _NAME
    try:
        yield
    finally:
        factory.default_provisioner_name = before
        del factory.provisioners[_NAME]


class ForkedKernel(LocalProvisioner):
    """A kernel whose command is ``python FILE arguments``, begun as a fork."""

    async def launch_kernel(self, cmd, **kwargs):
        _, program, *arguments = cmd
        self.cwd = kwargs["cwd"]
        job = program, arguments, _path_of_a_new_process()
        self.process = _Process(warm.fork(_kernel, job, cwd=self.cwd, environment=kwargs["env"]))
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class _Process:
    """A process of multiprocessing's, with the names of ``subprocess.Popen``."""

    stdin = stdout = stderr = None

    def __init__(self, process):
        self._process = process
        self.pid = process.pid
        self.kill = process.kill
        self.terminate = process.terminate

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)


@cache
def _path_of_a_new_process():
    """``sys.path`` without what pytest adds to it."""
    say = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    return json.loads(subprocess.check_output(say))


def _kernel(program, arguments, path):
    os.setsid()  # Jupyter signals to the group
    atexit._clear()  # what the process has registered that this is a fork of
    os.environ["JPY_PARENT_PID"] = str(os.getppid())  # at whose end a kernel ends
    sys.path[:] = path
    sys.argv = [program, *arguments]
    spawn = _with_forked_forkserver(server._spawn_in_own_group)
    try:
        with mock.patch.object(server, "_spawn_in_own_group", spawn):
            runpy.run_path(program, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves that out


def _with_forked_forkserver(spawn):
    """``spawn``, whose first forkserver is a fork, made now: later the kernel has threads."""
    ours, theirs = socket.socketpair()
    waiting = os.fork()
    if waiting == 0:
        ours.close()
        _become_forkserver(theirs)
    theirs.close()

    def begin(path, arguments, passed):
        code = arguments[-1]
        if ours.fileno() == -1 or not code.startswith(_IMPORT):
            return spawn(path, arguments, passed)
        request = {"code": code, "passed": passed, "environment": dict(os.environ)}
        with ours:
            socket.send_fds(ours, [json.dumps(request).encode() + b"\n"], passed)
        return waiting

    return begin


def _become_forkserver(asked):
    os.setpgid(0, 0)
    message, files, *_ = socket.recv_fds(asked, 1 << 16, 8)
    while message and not message.endswith(b"\n"):
        message += asked.recv(1 << 16)
    if not message:
        os._exit(0)  # the kernel has ended and started none
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    here = dict(zip(request["passed"], files, strict=True))
    from helpers.launch import rank  # there by now

    def file(value):
        return here[value] if isinstance(value, int) else value

    def main(*arguments, **named):
        named = {name: file(value) for name, value in named.items()}
        multiprocessing.forkserver.main(*map(file, arguments), **named)

    try:
        exec(request["code"].removeprefix(_IMPORT), {"main": main})
    except Exception:
        traceback.print_exc()
    finally:
        rank._end_forkserver(os.environ[forkserver.SOCKETS_FOLDER], os.getpid())
