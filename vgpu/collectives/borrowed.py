"""What gloo gets of virtual tensors for a collective, and when it has let go of it.

gloo works in threads of its own. Such a thread drops the tensors a moment after ``wait`` has
returned elsewhere, and until then their bytes would stand among what is allocated: how much that is
would be a matter of luck. NCCL's tensors are the caller's again once it has waited. So gloo gets
tensors of its own, with the same storage, and who else refers to those is known.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from vgpu.memory import blocks as memory
from vgpu.tensor.tensor import VirtualTensor, wrap

# A thread that has done its work lets go of it as soon as it runs again.
_SOON_S = 1.0
# A future that somebody keeps, or C++, may hold the tensors for good.
_MAYBE_NEVER_S = 0.02
_POLL_S = 20e-6

_use_count = torch._C._storage_Use_Count


def _references(things: list[Any]) -> list[int]:
    """How many references there are to each, those of the list and of this function among them."""
    return [sys.getrefcount(thing) for thing in things]


_ALONE = _references([object()])[0]  # versions of Python count differently


class Lent:
    """The tensors of one collective, as gloo gets them."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._given: dict[int, VirtualTensor] = {}
        self._of_gloo: list[torch.Tensor] = []
        self._users: dict[int, int] = {}  # by storage, before it was lent
        self._works: list[dist.Work] = []

    def lend(self, value: Any) -> Any:
        """What gloo gets in place of a virtual tensor, or of those in a list. Only gloo may keep it."""
        if type(value) is VirtualTensor and value._inner.layout is torch.strided:
            storage = value._inner.untyped_storage()._cdata
            self._users.setdefault(storage, _use_count(storage))
            lent = self._twin(value)
            self._given[id(lent._inner)] = value
            self._of_gloo.append(lent._inner)
            return lent
        return type(value)(map(self.lend, value)) if isinstance(value, list | tuple) else value

    def _twin(self, tensor: VirtualTensor) -> VirtualTensor:
        return wrap(tensor._inner.detach(), tensor._gpu, self._operation)

    def own(self, result: Any) -> Any:
        """The result, with the caller's own tensors in it.

        A collective hands back what it has written to, and autograd warns there if that needs a
        gradient; c10d's schemas do not say which argument it is.
        """
        own = self._own(result)
        self._given.clear()
        return own

    def _own(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(map(self._own, result))
        if type(result) is not VirtualTensor or result._inner.layout is not torch.strided:
            return result
        if id(result._inner) in self._given:
            return self._given[id(result._inner)]
        # A functional collective has made it, and gloo writes to it.
        self._of_gloo.append(result._inner)
        return self._twin(result)

    def waited_for(self, result: list[Any]) -> None:
        """Wait for the work, which stands last, as the caller is about to; one that has ended takes
        its place, since gloo's own holds the tensors."""
        work = dist.Work.unbox(result.pop())
        work.wait()
        del work
        self.has_returned(_SOON_S)
        # gloo also makes views, and nobody else has made any meanwhile.
        _wait_while(self._has_users, _MAYBE_NEVER_S)
        result.append(dist.Work.boxed(PythonCallbackWork(done)))

    def until_dropped(self, work: dist.Work) -> None:
        """Its caller waits for the work, and then drops it."""
        self._works.append(work)
        with _lock:
            _under_way.append(self)

    def is_dropped(self) -> bool:
        """Whether the work has ended and nobody else refers to it; if so, nor does this any more."""
        if _references(self._works) != [_ALONE] or not self._works[0].is_completed():
            return False
        self._works.clear()
        return True

    def with_tensors(self, result: Any) -> None:
        """A functional collective's: its caller waits for one of the tensors."""
        if isinstance(result, list | tuple):
            for part in result:
                self.with_tensors(part)
        elif type(result) is VirtualTensor:
            result._inner._vgpu_lent = self  # type: ignore[attr-defined]

    def has_returned(self, limit_s: float) -> None:
        """Wait until gloo has let go of its tensors, and do so, too."""
        _wait_while(self._is_lent, limit_s)
        self._of_gloo.clear()

    def _has_users(self) -> bool:
        return any(_use_count(storage) > before for storage, before in self._users.items())

    def _is_lent(self) -> bool:
        # A thread that has let go of one in C++ waits for Python's lock to do so in Python. The
        # Python object counts as one reference from C++.
        in_cpp = any(tensor._use_count() > 1 for tensor in self._of_gloo)
        return in_cpp or any(count > _ALONE for count in _references(self._of_gloo))


def _wait_while(condition: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while condition() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def done(timeout: Any) -> bool:
    """What waiting for work that has ended does."""
    return True


def take_back(tensor: VirtualTensor) -> None:
    """The tensor of a functional collective has been waited for."""
    lent: Lent | None = getattr(tensor._inner, "_vgpu_lent", None)
    if lent is not None:
        del tensor._inner._vgpu_lent  # type: ignore[attr-defined]
        lent.has_returned(_MAYBE_NEVER_S)


# A finalizer that counts bytes may run in the thread that holds the lock.
_lock = threading.RLock()
_under_way: list[Lent] = []


def _take_back_dropped() -> None:
    """Before bytes are counted: of works that have ended and that nobody else refers to."""
    with _lock:
        dropped = [lent for lent in _under_way if lent.is_dropped()]
        _under_way[:] = [lent for lent in _under_way if lent not in dropped]
    for lent in dropped:
        lent.has_returned(_MAYBE_NEVER_S)


memory.lent_to(_under_way, _take_back_dropped)
