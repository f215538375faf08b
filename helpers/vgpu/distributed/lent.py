"""What gloo gets of virtual tensors for a collective, and when it has let go of it.

gloo works in threads of its own. Such a thread drops the tensors a moment after ``wait`` has
returned elsewhere, and until then their bytes would stand among what is allocated: how much that is
would be a matter of luck. NCCL's tensors are the caller's again once it has waited. So gloo gets
tensors of its own, with the same storage, and their end says that it is done with them.
"""

import sys
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from helpers.vgpu.device import memory
from helpers.vgpu.dispatch.tensor import VirtualTensor, wrap

# A thread that has done its work lets go of it as soon as it runs again.
_SOON_S = 1.0
# A future that somebody keeps, or C++, may hold the tensors for good.
_MAYBE_NEVER_S = 0.02
_POLL_S = 20e-6


class Lent:
    """The tensors of one collective, as gloo gets them."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._given: dict[int, VirtualTensor] = {}
        self._of_gloo: list[weakref.ref[torch.Tensor]] = []

    def lend(self, value: Any) -> Any:
        """What gloo gets in place of a virtual tensor, or of those in a list. Only gloo may keep it."""
        if type(value) is VirtualTensor and value._inner.layout is torch.strided:
            lent = self._twin(value)
            self._given[id(lent._inner)] = value
            self._of_gloo.append(weakref.ref(lent._inner))
            return lent
        return type(value)(map(self.lend, value)) if isinstance(value, list | tuple) else value

    def _twin(self, tensor: VirtualTensor) -> VirtualTensor:
        return wrap(tensor._inner.detach(), tensor._gpu, self._operation)

    def own(self, result: Any) -> Any:
        """The result, with the caller's own tensors in it.

        A collective hands back what it has written to, and autograd warns there if that needs a
        gradient; c10d's schemas do not say which argument it is.
        """
        if isinstance(result, list | tuple):
            return type(result)(map(self.own, result))
        if type(result) is not VirtualTensor or result._inner.layout is not torch.strided:
            return result
        if id(result._inner) in self._given:
            return self._given[id(result._inner)]
        # A functional collective has made it, and gloo writes to it.
        self._of_gloo.append(weakref.ref(result._inner))
        return self._twin(result)

    def waited_for(self, result: list[Any]) -> None:
        """Wait for the work, which stands last, as the caller is about to; one that has ended takes
        its place, since gloo's own holds the tensors."""
        work = dist.Work.unbox(result.pop())
        work.wait()
        del work
        self.has_returned(_SOON_S)
        result.append(dist.Work.boxed(PythonCallbackWork(_done)))

    def until_dropped(self, work: dist.Work) -> None:
        """Its caller waits for the work, and then drops it."""
        with _lock:
            _under_way.append((work, self))

    def with_tensors(self, result: Any) -> None:
        """A functional collective's: its caller waits for one of the tensors."""
        if isinstance(result, list | tuple):
            for part in result:
                self.with_tensors(part)
        elif type(result) is VirtualTensor:
            result._inner._vgpu_lent = self  # type: ignore[attr-defined]

    def has_returned(self, limit_s: float) -> None:
        """Wait until gloo has let go of its tensors."""
        end_s = time.monotonic() + limit_s
        while any(of_gloo() is not None for of_gloo in self._of_gloo):
            if time.monotonic() > end_s:
                return
            time.sleep(_POLL_S)


def _done(timeout: Any) -> bool:
    return True


def take_back(tensor: VirtualTensor) -> None:
    """The tensor of a functional collective has been waited for."""
    lent: Lent | None = getattr(tensor._inner, "_vgpu_lent", None)
    if lent is not None:
        del tensor._inner._vgpu_lent  # type: ignore[attr-defined]
        lent.has_returned(_MAYBE_NEVER_S)


_lock = threading.Lock()
_under_way: list[tuple[dist.Work, Lent]] = []


def _take_back_dropped() -> None:
    """Before bytes are counted: of works that have ended and that nobody else refers to."""
    dropped = []
    with _lock:
        for entry in _under_way[:]:
            work = entry[0]
            # The entry, this variable and the call's own argument refer to it.
            if sys.getrefcount(work) == 3 and work.is_completed():
                _under_way.remove(entry)
                dropped.append(entry[1])
            del work, entry
    for lent in dropped:
        lent.has_returned(_MAYBE_NEVER_S)


memory.lent_to(_under_way, _take_back_dropped)
