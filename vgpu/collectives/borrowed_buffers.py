"""What gloo borrows of virtual tensors for a collective, and when it has returned it.

gloo works in threads of its own. Such a thread drops the tensors a moment after ``wait`` has
returned elsewhere, and until then their bytes would count as allocated: how much that is would be a
matter of luck. NCCL's tensors are the caller's again once it has waited. So gloo gets tensors of its
own, with the same storage, and who else refers to those is known.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vgpu.memory import blocks
from vgpu.tensor.tensor import VirtualTensor, wrap

# A thread that has done its work lets go of it as soon as it runs again.
_SOON_S = 1.0
# A future that somebody keeps, or C++, may hold the tensors for good.
_MAYBE_NEVER_S = 0.02
_POLL_S = 20e-6

_use_count = torch._C._storage_Use_Count


def _references(values: list[Any]) -> list[int]:
    """How many references there are to each, those of the list and of this function among them."""
    return [sys.getrefcount(value) for value in values]


_ALONE = _references([object()])[0]  # versions of Python count differently


class Work(Protocol):
    """What a collective's caller waits for."""

    def has_ended(self) -> bool: ...


class BorrowedBuffers:
    """The tensors of one collective, as gloo gets them."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._callers: dict[int, VirtualTensor] = {}  # by id of gloo's tensor
        self._gloos: list[torch.Tensor] = []
        self._uses_before: dict[int, int] = {}  # by storage
        self._works: list[Work] = []

    def lend(self, value: Any) -> Any:
        """What gloo gets in place of a virtual tensor, or of those in a list; only gloo may keep it."""
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
        """gloo's result, with the caller's own tensors in it.

        A collective returns what it has written to, and autograd warns there if that needs a
        gradient; c10d's schemas do not say which argument it is.
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
        # A functional collective has made it, and gloo writes to it.
        self._gloos.append(value._inner)
        return self._twin(value)

    def wait_for_work(self, result: list[Any]) -> None:
        """Wait for the work, which is last in the result, as the caller is about to, and drop it:
        it has the tensors."""
        work = dist.Work.unbox(result.pop())
        work.wait()
        del work
        self.wait_for_return(_SOON_S)
        # gloo also makes views, and nobody else has made any meanwhile.
        _wait_while(self._is_viewed, _MAYBE_NEVER_S)

    def return_when_dropped(self, work: Work) -> None:
        """Its caller waits for the work, and then drops it."""
        self._works.append(work)
        with blocks.borrowed_lock:
            blocks.borrowed.append(self)

    def is_dropped(self) -> bool:
        """Whether the work has ended and nobody else refers to it; if so, nor does this any more."""
        if _references(self._works) != [_ALONE] or not self._works[0].has_ended():
            return False
        self._works.clear()
        return True

    def return_when_waited_for(self, result: Any) -> None:
        """A functional collective's: its caller waits for one of the tensors."""
        if isinstance(result, list | tuple):
            for part in result:
                self.return_when_waited_for(part)
        elif type(result) is VirtualTensor:
            result._inner._vgpu_borrowed = self  # type: ignore[attr-defined]

    def wait_for_return(self, limit_s: float = _MAYBE_NEVER_S) -> None:
        """Wait until gloo has dropped its tensors, and do so, too."""
        _wait_while(self._is_borrowed, limit_s)
        self._gloos.clear()

    def _is_viewed(self) -> bool:
        return any(_use_count(storage) > before for storage, before in self._uses_before.items())

    def _is_borrowed(self) -> bool:
        # A thread that has dropped one in C++ waits for Python's lock to do so in Python. The
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
    """The tensor of a functional collective has been waited for."""
    borrowed: BorrowedBuffers | None = getattr(tensor._inner, "_vgpu_borrowed", None)
    if borrowed is not None:
        del tensor._inner._vgpu_borrowed  # type: ignore[attr-defined]
        borrowed.wait_for_return()
