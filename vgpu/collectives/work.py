"""The work that a collective on virtual GPUs returns, and its future.

gloo transfers the values, if there are any. In a recording, a wait also takes virtual time.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from vgpu.collectives import wrappers
from vgpu.collectives.borrowed_buffers import BorrowedBuffers
from vgpu.collectives.calls import Call, Tensors
from vgpu.memory.gpus import VirtualGPU, in_backward
from vgpu.time import recording
from vgpu.time.program import Enqueued


class Waiting:
    """Waits for a collective: the current stream waits or, for a barrier, the host does."""

    def __init__(self, done: Enqueued | None, gpu: VirtualGPU, by_host: bool) -> None:
        self._done = done
        self._gpu = gpu
        self._by_host = by_host
        self._recording = recording.under_way

    def __call__(self) -> None:
        now = recording.under_way
        if self._done is not None and now is not None and now is self._recording:
            now.wait_for(self._done, self._gpu, self._by_host)


class OwnMessage:
    """One end of a rank's message to itself; the counterpart of gloo's work for other messages."""

    def __init__(self, call: Call, pending: list[Call]) -> None:
        self._call = call
        self._pending = pending

    def is_completed(self) -> bool:
        return self._call not in self._pending

    def wait(self, timeout: timedelta = timedelta()) -> None:
        if not self.is_completed():
            call = self._call
            raise RuntimeError(
                f"rank {call.peer} of the group waits for a {call.name} to or from itself that has "
                "no counterpart: pass the send and its receive to the same dist.batch_isend_irecv"
            )

    def _source_rank(self) -> int | None:
        return self._call.peer


class Ending:
    """Tracks the end of a collective: gloo's transfer of the values, and the virtual time."""

    def __init__(
        self,
        call: Call,
        gloos: dist.Work | OwnMessage | None = None,
        buffers: BorrowedBuffers | None = None,
    ) -> None:
        """``gloos`` is the work that transfers the values; None if it's done or there are none."""
        self._name = call.name
        self._is_send = call.name == "send"
        self.outputs: Tensors = call.inputs if self._is_send else call.outputs
        self.gloos = gloos
        self.buffers = buffers or BorrowedBuffers(call.name)
        self.waiting: Callable[[], None] = lambda: None
        """Waits for the collective in virtual time."""
        self._ended = gloos is None
        self._lock = threading.Lock()
        self._in_background: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta) -> bool:
        """Wait as ``Work.wait`` does; without a timeout, the group's applies."""
        self.wait_for_values(timeout)
        self.waiting()
        if self._is_send:
            self.outputs = []  # NCCL's work for a batch of messages drops them here, too
        return True

    def wait_for_values(self, timeout: timedelta) -> None:
        with self._lock:  # some of gloo's works would copy the results again at every wait
            if not self._ended and self.gloos is not None:
                self._wait_for_gloo(self.gloos, timeout)
                self._ended = True

    def _wait_for_gloo(self, gloos: dist.Work | OwnMessage, timeout: timedelta) -> None:
        if not timeout:
            gloos.wait()
            return
        began_s = time.monotonic()
        try:
            gloos.wait(timeout)
        except RuntimeError as error:
            limit_s = timeout.total_seconds()
            if time.monotonic() - began_s < limit_s:
                raise
            raise RuntimeError(  # in NCCL's words, which programs look for
                f"caught collective operation timeout: {self._name} has not finished within the "
                f"{limit_s:g} s passed to wait(); a rank of its group is late, or never called it"
            ) from error

    def has_ended(self) -> bool:
        return self._ended or (self.gloos is not None and self.gloos.is_completed())

    def in_background(self) -> "torch.futures.Future[Any]":
        """Wait for gloo in a thread: not all of its collectives signal when they have finished."""
        if self._in_background is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._in_background = future
            if self._ended:
                future.set_result(None)
            else:
                threading.Thread(target=self._wait_and_tell, args=[future], daemon=True).start()
        return self._in_background

    def _wait_and_tell(self, future: "torch.futures.Future[Any]") -> None:
        try:
            self.wait_for_values(timedelta())
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)


class _Future(torch.futures.Future[Any]):
    """Holds the collective's outputs once it has finished, as NCCL's futures do."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self._waiting = ending.waiting
        outputs = ending.outputs

        def pass_on(ended: "torch.futures.Future[Any]") -> None:
            try:
                ended.value()
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(outputs)

        ending.in_background().add_done_callback(pass_on)

    def wait(self) -> Any:
        outputs = super().wait()
        self._waiting()
        return outputs

    def value(self) -> Any:
        return super().wait()  # if the work has been waited for, its thread may need a moment

    def then(self, callback: Callable[..., Any]) -> "torch.futures.Future[Any]":
        def then(done: "torch.futures.Future[Any]") -> Any:
            self._waiting()
            return callback(done)

        return super().then(then)


class _PythonWork:
    """The methods of a work that Python calls, except ``wait``."""

    _ending: Ending

    def has_ended(self) -> bool:
        return self._ending.has_ended()

    def is_completed(self) -> bool:
        return self._ending.has_ended() or self._ending.in_background().done()

    def get_future(self) -> Any:
        return _Future(self._ending)

    def result(self) -> Tensors:
        return self._ending.outputs

    def _source_rank(self) -> Any:
        gloos = self._ending.gloos
        return gloos._source_rank() if gloos is not None else None

    source_rank = _source_rank


class _Work(_PythonWork, PythonCallbackWork):
    """The work that a c10d operator returns.

    C++ may keep the work and wait for it after its Python object is gone. If C++ asks for a future,
    it gets a C++ one, which completes once somebody waits.
    """

    def __init__(self, ending: Ending) -> None:
        PythonCallbackWork.__init__(self, ending.wait)
        self._ending = ending


class _JoinWork(_PythonWork, dist.Work):
    """The work of an all-reduce over one of DDP's groups outside of a backward pass.

    In ``model.join()``, C++ asks for the future of each all-reduce that a rank without data issues,
    drops the work, and waits for the future. So it must be this class's future, which C++ finds as
    long as the Python object exists.
    """

    def __init__(self, ending: Ending) -> None:
        dist.Work.__init__(self)
        self._ending = ending

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return self._ending.wait(timeout)


def work_of(call: Call, ending: Ending) -> dist.Work:
    is_for_ddp = call.name == "all_reduce" and call.group in wrappers.ddp_groups
    if is_for_ddp and in_backward():
        is_recorded = isinstance(ending.waiting, Waiting)
        if not is_recorded and isinstance(ending.gloos, dist.Work):
            return ending.gloos
        return _BucketWork(ending)
    work = _JoinWork(ending) if is_for_ddp else _Work(ending)
    ending.buffers.return_when_dropped(work)
    return work


class _BucketWork(dist.Work):
    """DDP's work for a bucket; at the end of the backward pass, C++ waits for its future."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self._ending = ending
        # The callback keeps this object alive until then: C++ calls Python only while it exists.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        waiting, self._ending.waiting = self._ending.waiting, lambda: None
        waiting()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._ending.wait(timeout)
        return True

    def get_future(self) -> Any:
        # A C++ future, whose value C++ can read; torch.futures.Future holds Python objects.
        self._ending.wait_for_values(timedelta())
        return torch._C.fork(lambda: self._ending.outputs)
