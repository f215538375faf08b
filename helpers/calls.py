"""Writes down which operations PyTorch is asked for, so that a copy can be seen and counted."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# What makes a second set of bytes out of a first: between devices or dtypes, into, and beside it.
_COPYING = ("_to_copy", "copy_", "clone")


class Calls(TorchDispatchMode):
    """The operations that reach PyTorch's dispatcher inside a ``with`` block, in order.

    ``names`` holds their plain names ("zeros", "mul", "_to_copy"), ``made`` each with its keyword
    arguments as one text, "_to_copy(device=cuda:0)"; None and False are left out. Views and calls that hand back
    what they were given, such as ``.to`` to the same device, dispatch no copy and list none. Only
    the thread that enters the block is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.made: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the whole compiler at the first call, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = ", ".join(f"{key}={value}" for key, value in (kwargs or {}).items() if value)
        self.names.append(name)
        self.made.append(f"{name}({given})")
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> int:
        """How many of the operations copied a tensor."""
        return sum(name in _COPYING for name in self.names)
