"""The buffers that gloo borrows from virtual tensors for a collective, and when it returns them.

gloo has its own threads. They drop the tensors a moment after ``wait`` has returned in the calling
thread, and until then the tensors' bytes count as allocated, so the allocated amount would vary at
random. With NCCL, only the caller refers to the tensors after waiting. So gloo gets separate
tensors with the same storage, and all other references to them are known.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vgpu.memory import blocks
from vgpu.tensor.tensor import VirtualTensor, wrap

# A thread that has finished drops its tensors as soon as it runs again.
_SOON_S = 1.0
# C++, or a future that someone keeps, may hold the tensors forever.
_MAYBE_NEVER_S = 0.02
_POLL_S = 20e-6

_use_count = torch._C._storage_Use_Count


def _references(values: list[Any]) -> list[int]:
    """Return the number of references to each value, including the list's and this function's."""
    return [sys.getrefcount(value) for value in values]


_ALONE = _references([object()])[0]  # Python versions count differently


class Work(Protocol):
    """What a collective's caller waits for."""

    def has_ended(self) -> bool: ...


class BorrowedBuffers:
    """One collective's tensors, as passed to gloo."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._callers: dict[int, VirtualTensor] = {}  # by id of gloo's tensor
        self._gloos: list[torch.Tensor] = []
        self._uses_before: dict[int, int] = {}  # by storage
        self._works: list[Work] = []

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

    def return_when_dropped(self, work: Work) -> None:
        """Have gloo return the tensors once the caller, who waits for the work, has dropped it."""
        self._works.append(work)
        with blocks.borrowed_lock:
            blocks.borrowed.append(self)

    def is_dropped(self) -> bool:
        """Whether the work has finished and nothing else refers to it; if so, it's dropped."""
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
