"""Each GPU's memory by cause: at one point in time, or after every operation of a step."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from vgpu.memory import gpus
from vgpu.memory.blocks import rounded
from vgpu.profiling.counters import EagerDispatchMode

OTHER = "activations and other"
ACTIVATIONS, TEMPORARY = "activations", "temporary"


@dataclass(frozen=True)
class Snapshot:
    """Each device's bytes by cause, in the order in which the causes were passed.

    ``peak_bytes`` is each device's peak since the previous snapshot, or since the peak was reset.
    """

    step: str
    by_cause: dict[torch.device, dict[str, int]]
    peak_bytes: dict[torch.device, int]

    def total_bytes(self, device: torch.device) -> int:
        """Return the total bytes allocated on ``device``."""
        return sum(self.by_cause[device].values())


def snapshot(
    step: str, gpus: Sequence[torch.device], known: Mapping[str, Iterable[torch.Tensor]]
) -> Snapshot:
    """Return the bytes on each of ``gpus`` now, split by cause.

    ``known`` maps a cause to its tensors, on any device. A tensor counts once, for its first cause.
    Anything else that's allocated counts as ``OTHER``: mostly tensors that autograd saved for the
    backward pass, and the allocator's rounding to 512 bytes. Resets each device's peak.
    """
    module = torch.get_device_module(gpus[0])
    peak_bytes = {gpu: module.max_memory_allocated(gpu) for gpu in gpus}
    seen: set[tuple[torch.device, int]] = set()
    by_cause: dict[torch.device, dict[str, int]] = {}
    sizes = {gpu: dict.fromkeys(known, 0) for gpu in gpus}
    for cause, tensors in known.items():
        for tensor in tensors:
            place = (tensor.device, tensor.data_ptr())
            if tensor.device in sizes and place not in seen:
                seen.add(place)
                sizes[tensor.device][cause] += tensor.nbytes
    for gpu in gpus:
        rest = module.memory_allocated(gpu) - sum(sizes[gpu].values())
        by_cause[gpu] = {**sizes[gpu], OTHER: rest}
        module.reset_peak_memory_stats(gpu)
    return Snapshot(step, by_cause, peak_bytes)


def peaks_during(step: Callable[[], object], gpus: Sequence[torch.device]) -> list[int]:
    """Return the peak bytes of ``step()`` on each of ``gpus``, minus those allocated before it."""
    module = torch.get_device_module(gpus[0])
    for gpu in gpus:
        module.reset_peak_memory_stats(gpu)
    # Otherwise, tensors in reference cycles would be freed at arbitrary times.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        before = [module.memory_allocated(gpu) for gpu in gpus]
        step()
        peaks = [module.max_memory_allocated(gpu) for gpu in gpus]
    finally:
        if was_enabled:
            gc.enable()
    return [peak - start for peak, start in zip(peaks, before, strict=True)]


@contextmanager
def capacity(gpu: torch.device, size_bytes: int) -> Iterator[None]:
    """Limit the memory of ``gpu`` to ``size_bytes`` inside the block.

    On a real GPU, PyTorch's caching allocator enforces the limit, which includes reserved memory;
    on a virtual GPU, only allocated memory counts. Exceeding it raises torch.OutOfMemoryError.
    Raises ValueError for a size that isn't positive, or a device that isn't a GPU.
    """
    virtual = gpus.resolve(gpu)
    if size_bytes <= 0 or (gpu.type != "cuda" and virtual is None):
        raise ValueError(
            f"expected a GPU and a positive number of bytes, got {size_bytes} for {gpu}"
        )
    torch.get_device_module(gpu).empty_cache()
    if gpu.type == "cuda":
        before_bytes = torch.cuda.get_device_properties(gpu).total_memory

        def set_bytes(capacity_bytes: int) -> None:
            torch.cuda.set_per_process_memory_fraction(capacity_bytes / before_bytes, gpu)

    elif virtual is not None:
        set_bytes, before_bytes = virtual.memory.set_capacity, virtual.memory.capacity_bytes
    set_bytes(size_bytes)
    try:
        yield
    finally:
        set_bytes(before_bytes)


@dataclass(frozen=True)
class Moment:
    """The bytes allocated right after one operation of a step, by cause and by module."""

    phase: str
    operation: str  # its name in torch.ops.aten
    by_cause: dict[str, int]
    activations_by_module: dict[str, int]  # whose forward created them; "" outside all modules

    @property
    def total_bytes(self) -> int:
        return sum(self.by_cause.values())


class StepRecord(EagerDispatchMode):
    """The bytes on one GPU after every operation of a training step, by cause.

    Use it as a context manager around one step; inside it, ``phase(name)`` starts the next phase.
    The causes are, in order, parameters, optimizer state, inputs, gradients (the ``.grad`` of
    parameters), activations (created in the phase "forward", or in a module's forward during
    recomputation), and temporary: the rest, such as gradients of activations, and the optimizer's
    temporary tensors. Anything else that was on the GPU before the step is left out. Sizes are
    rounded up to multiples of 512 bytes, as allocators do. Memory that an operation allocates and
    frees while it runs isn't seen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.moments: list[Moment] = []
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        self._gpu = self._parameters[0].device
        self._phase = "forward"
        self._running: list[str] = []
        # Storages created in forward: address → (weak reference, bytes, module).
        self._activations: dict[int, tuple[StorageWeakRef, int, str]] = {}
        # A cache, since sizes are needed after every operation: id → (the tensor, address, bytes).
        self._measured: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._hooks: list[Any] = []
        self._before_bytes = 0

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    def phase(self, name: str) -> None:
        """Start the phase ``name``, such as "backward"."""
        self._phase = name

    def most(self, cause: str) -> int:
        """Return the peak bytes of ``cause``."""
        return max(moment.by_cause[cause] for moment in self.moments)

    def __enter__(self) -> Self:
        self._before_bytes = self._allocated() - sum(self._known()[0].values())
        for name, module in self._model.named_modules():
            enter = module.register_forward_pre_hook(
                lambda *_, name=name: self._running.append(name)
            )
            # Also runs if activation checkpointing stops a recomputation early with an exception.
            leave = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            self._hooks += [enter, leave]
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for hook in self._hooks:
            hook.remove()
        # Don't keep anything from the step alive.
        del self._model, self._optimizer, self._inputs, self._parameters, self._buffers
        self._activations.clear()
        self._measured.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._phase == "forward" or self._running:
            self._note_new(result, (args, kwargs))
        if func.namespace == "aten":  # not the profiler's markers
            self.moments.append(self._moment(func.overloadpacket.__name__))
        return result

    def _leave(self) -> None:
        self._running.pop()

    def _allocated(self) -> int:
        return torch.get_device_module(self._gpu).memory_allocated(self._gpu)

    def _note_new(self, result: Any, inputs: Any) -> None:
        """Remember the storages that an operation created: those that aren't its inputs'."""
        old = {_place(tensor) for tensor in self._own(inputs)}
        for tensor in self._own(result):
            if _place(tensor) not in old:
                module = self._running[-1] if self._running else ""
                ref = StorageWeakRef(tensor.untyped_storage())
                self._activations[_place(tensor)] = (ref, _size_bytes(tensor), module)

    def _own(self, values: Any) -> list[torch.Tensor]:
        return [
            value
            for value in tree_leaves(values)
            if isinstance(value, torch.Tensor) and value.device == self._gpu
        ]

    def _known(self) -> tuple[dict[str, int], set[int]]:
        """Return the bytes of causes with known tensors, and the addresses of these tensors."""
        state = self._optimizer.state if self._optimizer else {}
        # Called thousands of times: skip __torch_function__ of tensor subclasses.
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in self._parameters]
        causes = {
            "parameters": [*self._parameters, *self._buffers],
            "optimizer state": [kept for entry in state.values() for kept in entry.values()],
            "inputs": self._inputs,
            "gradients": gradients,
        }
        by_cause: dict[str, int] = {}
        seen: set[int] = set()
        for cause, tensors in causes.items():
            by_cause[cause] = 0
            for tensor in tensors:
                place, size_bytes = self._measure(tensor)
                if place not in seen:
                    seen.add(place)
                    by_cause[cause] += size_bytes
        return by_cause, seen

    def _measure(self, value: Any) -> tuple[int, int]:
        """Return the address and bytes of a tensor's storage, or (0, 0) if it isn't on the GPU."""
        known = self._measured.get(id(value))
        if known is None or known[0]() is not value:
            if not isinstance(value, torch.Tensor) or value.device != self._gpu:
                return 0, 0
            known = weakref.ref(value), _place(value), _size_bytes(value)
            self._measured[id(value)] = known
        return known[1:]

    def _moment(self, operation: str) -> Moment:
        by_cause, places = self._known()
        self._activations = {
            place: entry for place, entry in self._activations.items() if not entry[0].expired()
        }
        by_module: dict[str, int] = {}
        for place, (_, size_bytes, module) in self._activations.items():
            if place not in places:
                by_module[module] = by_module.get(module, 0) + size_bytes
        by_cause[ACTIVATIONS] = sum(by_module.values())
        by_cause[TEMPORARY] = self._allocated() - self._before_bytes - sum(by_cause.values())
        return Moment(self._phase, operation, by_cause, by_module)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage, rounded up as allocators do."""
    return rounded(tensor.untyped_storage().nbytes())
