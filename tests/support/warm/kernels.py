"""Lessons' kernels from a process that has imported torch: four seconds of computing less for each.

Two are the kernel's own, two those of the forkserver that its ranks come from. The kernels are
processes such as ``launch.run`` starts, on systems that fork. ``pytest --nbmake notebooks`` alone
starts those that a learner gets, and so do CI's lessons.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

import warm
from warm import forkservers

_NAME = "forked"


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
    try:
        with forkservers.in_use():
            runpy.run_path(program, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves that out
