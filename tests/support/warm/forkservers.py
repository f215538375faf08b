"""A forkserver for a kernel's ranks that is a fork as well, and so has imported torch.

``in_use`` forks it when the kernel begins, which has no threads then, and it waits. To the kernel it
is the process that multiprocessing starts: a child, in a process group of its own.
"""

import json
import multiprocessing.forkserver
import os
import socket
import traceback
from contextlib import contextmanager
from unittest import mock

from vgpu.launch import forkserver

_IMPORT = "from multiprocessing.forkserver import main; "  # so begins what Python is to run


@contextmanager
def in_use():
    """The first forkserver that this process starts is a fork of it, made now."""
    ours, theirs = socket.socketpair()
    waiting = os.fork()
    if waiting == 0:
        ours.close()
        _wait_and_serve(theirs)
    theirs.close()
    spawn = forkserver._spawn

    def begin(path, arguments, passed):
        code = arguments[-1]
        if ours.fileno() == -1 or not code.startswith(_IMPORT):
            return spawn(path, arguments, passed)
        request = {"code": code, "passed": passed, "environment": dict(os.environ)}
        with ours:
            socket.send_fds(ours, [json.dumps(request).encode() + b"\n"], passed)
        return waiting

    with mock.patch.object(forkserver, "_spawn", begin):
        yield


def _wait_and_serve(asked):
    """Be the forkserver that is asked for, or end with the process that never asked."""
    os.setpgid(0, 0)
    message, files, *_ = socket.recv_fds(asked, 1 << 16, 8)
    while message and not message.endswith(b"\n"):
        message += asked.recv(1 << 16)
    if not message:
        os._exit(0)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    here = dict(zip(request["passed"], files, strict=True))
    from vgpu.launch import rank  # there by now

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
