"""The operators that PyTorch is asked for, written down in order."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# What makes a second set of bytes out of a first: between devices or dtypes, into, and beside it.
_COPYING = ("_to_copy", "copy_", "clone")


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that costs no import.

    By default torch guards a mode against being compiled, and imports its whole compiler for that at
    the first call, which takes seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OperatorLog(EagerDispatchMode):
    """The operators that reach PyTorch's dispatcher inside a ``with`` block, in order.

    ``names`` holds their plain names ("zeros", "mul", "_to_copy"), ``lines`` each with its keyword
    arguments as one text, "_to_copy(device=cuda:0)"; None and False are left out. Views and calls that
    return what they were given, such as ``.to`` to the same device, dispatch no copy and list none.
    Only the thread that enters the block is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        arguments = ", ".join(f"{key}={value}" for key, value in (kwargs or {}).items() if value)
        self.names.append(name)
        self.lines.append(f"{name}({arguments})")
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> int:
        """How many of the operators copied a tensor."""
        return sum(name in _COPYING for name in self.names)
