"""The work that a collective on virtual GPUs returns, its future, and gloo's borrowed buffers.

gloo transfers the values, if there are any. In a recording, a wait also takes virtual time.
"""

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from vgpu.collectives import process_groups
from vgpu.collectives.table import Call, Tensors
from vgpu.memory import blocks
from vgpu.memory.gpus import VirtualGPU, in_backward
from vgpu.tensor.tensor import VirtualTensor, wrap
from vgpu.time import recording
from vgpu.time.program import Enqueued

# The buffers that gloo borrows, and when it returns them
#
# gloo has its own threads. They drop the tensors a moment after ``wait`` has returned in the
# calling thread, and until then the tensors' bytes count as allocated, so the allocated amount
# would vary at random. With NCCL, only the caller refers to the tensors after waiting. So gloo gets
# separate tensors with the same storage, and all other references to them are known.


# Once the work has finished, gloo's thread drops the tensors as soon as it runs again.
_SOON_S = 1.0
# C++, or a future that someone keeps, may hold the tensors forever.
_MAYBE_NEVER_S = 0.02
_POLL_S = 20e-6

_use_count = torch._C._storage_Use_Count


def _references(values: list[Any]) -> list[int]:
    """Return the number of references to each value, including the list's and this function's."""
    return [sys.getrefcount(value) for value in values]


_ALONE = _references([object()])[0]  # the count differs between Python versions


class _Awaited(Protocol):
    """What a collective's caller waits for."""

    def has_ended(self) -> bool: ...


class BorrowedBuffers:
    """One collective's tensors, as passed to gloo."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._callers: dict[int, VirtualTensor] = {}  # by id of gloo's tensor
        self._gloos: list[torch.Tensor] = []
        self._uses_before: dict[int, int] = {}  # by storage
        self._works: list[_Awaited] = []

    def lend(self, value: Any) -> Any:
        """Return what to pass to gloo in place of virtual tensors; only gloo may keep it."""
        if type(value) is VirtualTensor and value._inner.layout is torch.strided:
            storage = value._inner.untyped_storage()._cdata
            self._uses_before.setdefault(storage, _use_count(storage))
            twin = self._twin(value)
            self._callers[id(twin._inner)] = value
            self._gloos.append(twin._inner)
            return twin
        return type(value)(map(self.lend, value)) if isinstance(value, list | tuple) else value

    def _twin(self, tensor: VirtualTensor) -> VirtualTensor:
        return wrap(tensor._inner.detach(), tensor._gpu, self._operation)

    def result(self, value: Any) -> Any:
        """Return gloo's result, with the caller's own tensors in it.

        A collective returns the tensors that it wrote to, and autograd then warns if they require
        gradients; c10d's schemas don't say which arguments those are.
        """
        result = self._result(value)
        self._callers.clear()
        return result

    def _result(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._result, value))
        if type(value) is not VirtualTensor or value._inner.layout is not torch.strided:
            return value
        if id(value._inner) in self._callers:
            return self._callers[id(value._inner)]
        # A functional collective created it, and gloo writes to it.
        self._gloos.append(value._inner)
        return self._twin(value)

    def wait_for_work(self, result: list[Any]) -> None:
        """Wait for the work, which is the result's last item, and drop it: it holds the tensors."""
        work = dist.Work.unbox(result.pop())
        work.wait()
        del work
        self.wait_for_return(_SOON_S)
        # gloo also creates views; nobody else has created any in the meantime.
        _wait_while(self._is_viewed, _MAYBE_NEVER_S)

    def return_when_dropped(self, work: _Awaited) -> None:
        """Have gloo return the tensors once the caller, who waits for the work, has dropped it."""
        self._works.append(work)
        with blocks.borrowed_lock:
            blocks.borrowed.append(self)

    def is_dropped(self) -> bool:
        """Whether the work has finished and nothing else refers to it; if so, drop it."""
        if _references(self._works) != [_ALONE] or not self._works[0].has_ended():
            return False
        self._works.clear()
        return True

    def return_when_waited_for(self, result: Any) -> None:
        """Have gloo return a functional collective's tensors once the caller has waited for one."""
        if isinstance(result, list | tuple):
            for part in result:
                self.return_when_waited_for(part)
        elif type(result) is VirtualTensor:
            result._inner._vgpu_borrowed = self  # type: ignore[attr-defined]

    def wait_for_return(self, limit_s: float = _MAYBE_NEVER_S) -> None:
        """Wait until gloo has dropped its tensors, and drop them here, too."""
        _wait_while(self._is_borrowed, limit_s)
        self._gloos.clear()

    def _is_viewed(self) -> bool:
        return any(_use_count(storage) > before for storage, before in self._uses_before.items())

    def _is_borrowed(self) -> bool:
        # A thread that has dropped a tensor in C++ waits for the GIL to drop it in Python. The
        # Python object counts as one reference from C++.
        in_cpp = any(
            tensor._use_count() > 1  # type: ignore[attr-defined, unused-ignore]
            for tensor in self._gloos
        )
        return in_cpp or any(count > _ALONE for count in _references(self._gloos))


def _wait_while(condition: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while condition() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def waited_for(tensor: VirtualTensor) -> None:
    """Get the buffers back after the caller has waited for a functional collective's tensor."""
    borrowed: BorrowedBuffers | None = getattr(tensor._inner, "_vgpu_borrowed", None)
    if borrowed is not None:
        del tensor._inner._vgpu_borrowed  # type: ignore[attr-defined]
        borrowed.wait_for_return()


# ``Work`` objects and futures


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
                f"rank {call.peer} of the group is waiting for a {call.name} to or from itself "
                "that has no counterpart: pass the send and its receive to the same "
                "dist.batch_isend_irecv"
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
        """``gloos`` is the work that transfers the values; None if none are left to transfer."""
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
        """Wait as ``Work.wait`` does; without a timeout, the group's timeout applies."""
        self.wait_for_values(timeout)
        self.waiting()
        if self._is_send:
            self.outputs = []  # NCCL's work for a batch of messages drops them here, too
        return True

    def wait_for_values(self, timeout: timedelta) -> None:
        with self._lock:  # some of gloo's Work objects would copy the results at every wait
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
        return super().wait()  # even after a wait for the work, its thread may need a moment

    def then(self, callback: Callable[..., Any]) -> "torch.futures.Future[Any]":
        def then(done: "torch.futures.Future[Any]") -> Any:
            self._waiting()
            return callback(done)

        return super().then(then)


class _PythonWork:
    """The methods of a ``Work`` that Python calls, except ``wait``."""

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
    it gets a C++ one, which completes once something waits for it.
    """

    def __init__(self, ending: Ending) -> None:
        PythonCallbackWork.__init__(self, ending.wait)
        self._ending = ending


class _JoinWork(_PythonWork, dist.Work):
    """The work of an all-reduce over one of DDP's groups outside of a backward pass.

    In ``model.join()``, C++ asks for the future of each all-reduce issued by a rank that has no
    data left, drops the work, and waits for the future. So it must be this class's future, which
    C++ finds as long as the Python object exists.
    """

    def __init__(self, ending: Ending) -> None:
        dist.Work.__init__(self)
        self._ending = ending

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return self._ending.wait(timeout)


def work_of(call: Call, ending: Ending) -> dist.Work:
    is_for_ddp = call.name == "all_reduce" and call.group in process_groups.ddp_groups
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
        # The callback keeps this object alive for the whole pass: C++ calls its methods only
        # while it exists.
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
