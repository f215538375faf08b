"""Run a random program on the CPU and on virtual GPUs, and compare the two."""

import copy
import gc
import io
import re
import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PRELUDE = """
import copy, io
import torch, torch.nn.functional as F
from torch import nn
"""


class Marks(TorchDispatchMode):
    """Marks every storage created in the block with an object that lives as long as the storage."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[weakref.ref] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage: Any = leaf.untyped_storage()
                if not hasattr(storage, "_mark"):
                    storage._mark = World(gpus=False)
                    self.marks.append(weakref.ref(storage._mark))
        return result


class World:
    """The names of a running program, on the CPU or on virtual GPUs."""

    def __init__(self, gpus: bool) -> None:
        self.gpus = gpus
        self.devices = ["vgpu:0", "vgpu:1", "cpu"] if gpus else ["cpu"] * 3
        self.errors: list[str] = []
        self.first: dict[str, int] = {}  # each variable's initial version
        self.names: dict[str, Any] = {
            "F": F,
            "copy": copy,
            "current": "vgpu" if gpus else "cpu",
            "d": self.devices,
            "leaf": self.leaf,
            "linear": self.linear,
            "move": self.move,
            "nn": nn,
            "reload": reload,
            "step": step,
            "to": self.to,
            "torch": torch,
            "use": self.use,
        }
        self.own = set(self.names)

    def leaf(
        self, shape: tuple[int, ...], start: int, dtype: str, place: int, grad: bool
    ) -> torch.Tensor:
        """Return a tensor with known values."""
        count = torch.Size(shape).numel()
        values = torch.arange(start, start + count, dtype=torch.float64).mul(1.3).sin()
        kind = getattr(torch, dtype)
        values = values.mul(5).to(kind) if kind is torch.int64 else values.to(kind)
        if kind.is_complex:
            values = values * (1 + 0.5j)
        return values.reshape(shape).clone().to(self.devices[place]).requires_grad_(grad)

    def linear(self, place: int) -> nn.Module:
        module = nn.Linear(3, 3).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(self.leaf(tuple(parameter.shape), 1, "float64", 2, False))
        module.place = place
        return module.to(self.devices[place])

    def move(self, module: nn.Module, place: int) -> None:
        """Call ``module.to``, but always copy; if all devices are the CPU, ``to`` wouldn't."""
        if not self.gpus and module.place != place:
            module._apply(torch.clone)
        module.place = place
        module.to(self.devices[place])

    def to(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """Return a copy on another device; if all are the CPU, ``to`` alone wouldn't copy."""
        return tensor.to(self.devices[place], copy=not self.gpus)

    def use(self, place: int) -> None:
        if self.gpus:
            torch.vgpu.set_device(place)

    def run(self, line: str) -> None:
        """Run a line, and record the type of the error that it raised."""
        try:
            exec(line, self.names)
        except NameError as error:
            self.errors.append("" if "'v" in str(error) else repr(error))
        except Exception as error:  # whatever it is, the other world must raise it, too
            self.errors.append(type(error).__name__)
        else:
            self.errors.append("")
        for name, value in self.names.items():
            if isinstance(value, torch.Tensor) and name not in self.first:
                self.first[name] = 0 if value.is_inference() else value._version

    def changes(self, name: str) -> int:
        """Return how many times a variable has been changed in place."""
        version = _ask(self.names[name], "_version")  # inference tensors have none
        return version - self.first[name] if isinstance(version, int) else 0

    def variables(self) -> dict[str, Any]:
        found = {}
        for name, value in self.names.items():
            if isinstance(value, nn.Module):
                found.update((f"{name}.{k}", p) for k, p in value.named_parameters())
            elif isinstance(value, torch.Tensor):
                found[name] = value
        return found


def reload(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def step(module: nn.Module, foreach: bool) -> None:
    torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=foreach).step()


def difference(lines: list[str]) -> str:
    """Return how the program differs between the CPU and virtual GPUs, or "" if it doesn't."""
    worlds = []
    before = _allocated()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for gpus in (False, True):
            torch.manual_seed(0)
            world = World(gpus)
            for line in lines:
                world.run(line)
                if gpus and (found := _impossible_bytes()):
                    return f"after {line!r}: {found}"
            worlds.append(world)
        found = _compare(lines, *worlds)
        for world in worlds:
            world.names.clear()
    torch.vgpu.set_device(0)
    if _allocated() != before:
        # After an error, autograd's queue keeps unfinished work until the next backward.
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
    left = [now - then for now, then in zip(_allocated(), before, strict=True)]
    if any(left) and not _leaks_on_the_cpu(lines):
        found = found or f"bytes left behind: {left}"
    return found


def _leaks_on_the_cpu(lines: list[str]) -> bool:
    """Return whether torch itself leaks memory, as in ``x.mul_(x)`` for a computed tensor."""
    world = World(gpus=False)
    with warnings.catch_warnings(), Marks() as block:
        warnings.simplefilter("ignore")
        for line in lines:
            world.run(line)
    world.names.clear()
    gc.collect()
    return any(mark() is not None for mark in block.marks)


def _allocated() -> list[int]:
    return [torch.vgpu.memory_allocated(k) for k in range(2)]


def _impossible_bytes() -> str:
    counted = _allocated()
    return f"bytes {counted}" if min(counted) < 0 else ""


def _compare(lines: list[str], cpu: World, gpu: World) -> str:
    for line, expected, found in zip(lines, cpu.errors, gpu.errors, strict=True):
        if expected != found:
            if _is_cut_short(line, cpu) or _is_cut_short(line, gpu):
                return ""
            return f"{line!r} raised {found or 'nothing'}, on the CPU {expected or 'nothing'}"
    variables, others = cpu.variables(), gpu.variables()
    if variables.keys() != others.keys():
        return f"variables {others.keys()}, on the CPU {variables.keys()}"
    for name, expected in variables.items():
        if name in cpu.names and name in gpu.names and cpu.changes(name) != gpu.changes(name):
            return f"{name}: changed {gpu.changes(name)} times, on the CPU {cpu.changes(name)}"
        if found := _compare_tensors(name, others[name], expected):
            return found
    grads = [{f"{n}.grad": _grad(t) for n, t in v.items()} for v in (variables, others)]
    for name, expected in grads[0].items():
        if found := _compare_tensors(name, grads[1][name], expected, gradient=True):
            return found
    for name in variables:
        for other in variables:
            shared = _storage(variables[name]) == _storage(variables[other]) is not None
            if (_storage(others[name]) == _storage(others[other]) is not None) != shared:
                return f"{name} and {other}: shared memory {not shared}, on the CPU {shared}"
    return ""


def _is_cut_short(line: str, world: World) -> bool:
    """Return whether a line names a tensor with a history but no elements.

    Without elements, autograd may cut a graph short, so which errors it raises is random.
    """
    named = [world.names.get(name) for name in re.findall(r"\bv\d+", line)]
    tensors = [value for value in named if isinstance(value, torch.Tensor)]
    return any(one.numel() == 0 and one.requires_grad for one in tensors)


def _grad(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if _ask(tensor, "is_leaf") is True or tensor.retains_grad else None


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory, or None if it has none."""
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else None


ASPECTS = ("dtype", "layout", "shape", "requires_grad", "is_leaf")


def _compare_tensors(name: str, found: Any, expected: Any, gradient: bool = False) -> str:
    """Return how two tensors differ, or "". gradient: ignore strides, which autograd may change."""
    if (found is None) != (expected is None):
        return f"{name}: {found}, on the CPU {expected}"
    if expected is None:
        return ""
    if found.is_inference() != expected.is_inference():
        return f"{name}: inference {found.is_inference()}, on the CPU {expected.is_inference()}"
    # Without elements, autograd may cut a graph short.
    for aspect in ASPECTS if expected.numel() else ASPECTS[:3]:
        one, other = _ask(found, aspect), _ask(expected, aspect)
        if one != other:
            return f"{name}: {aspect} {one}, on the CPU {other}"
    if not gradient and expected.layout is torch.strided and _strides(found) != _strides(expected):
        return f"{name}: stride {found.stride()}, on the CPU {expected.stride()}"
    try:
        with torch.no_grad():
            one, other = found.detach().cpu(), expected.detach()
            torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError as error:
        return f"{name}: {error}\nfound {one}\non the CPU {other}"
    return ""


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides, except the meaningless ones of dimensions with one element."""
    return [stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True) if n != 1]


def _ask(tensor: torch.Tensor, aspect: str) -> Any:
    """Return an attribute, or the type of the error if autograd rejects the tensor."""
    try:
        return getattr(tensor, aspect)
    except (IndexError, RuntimeError) as error:
        return type(error)


def shrunk(lines: list[str]) -> list[str]:
    """Remove lines from the program for as long as it still differs."""
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(lines))):
            shorter = lines[:index] + lines[index + 1 :]
            if difference(shorter):
                lines, changed = shorter, True
    return lines
