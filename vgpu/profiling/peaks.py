"""The bytes on one virtual GPU at the peak of a step, by cause.

Whereas ``memory.StepRecord`` measures after each operation, this file records each allocation,
including temporaries inside an operation. It also works with shapes, DTensors and FSDP2, on ranks,
and in ``vgpu.cluster``.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import vgpu
from vgpu import torch_releases
from vgpu.memory.blocks import MemoryEvent
from vgpu.memory.gpus import in_backward
from vgpu.tensor.tensor import VirtualTensor, block_of

PARAMETERS, STATE, GRADIENTS = "parameters", "optimizer state", "gradients"
GATHERED, ACTIVATIONS, TEMPORARY = "gathered parameters", "activations", "temporary"
OTHER = "other"
CAUSES = (PARAMETERS, STATE, GRADIENTS, GATHERED, ACTIVATIONS, TEMPORARY, OTHER)


class PeakByCause:
    """A context manager around a step; afterward, ``by_cause`` has the bytes at its (first) peak.

    Their sum is the step's ``max_memory_allocated()``. ``parts`` has the same for each part of the
    step, or for all of it if nothing called ``divide``. The causes are:

    - parameters, including buffers, and optimizer state: both persist between steps,
    - gradients: those of parameters, and FSDP2's buffers for reducing them,
    - gathered parameters: FSDP2's unsharded parameters, and its buffers for gathering them,
    - activations: everything that forward creates, including during recomputation,
    - temporary: gradients of activations, and the optimizer's temporary tensors,
    - other: anything else that was on the GPU before the step, and DDP's buckets.

    Determining the cause of a block takes a few microseconds, which slows the step down.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise ValueError for a model that isn't on a virtual GPU."""
        self._model, self._optimizer = model, optimizer
        self._device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        if self._device.type != "vgpu":
            raise ValueError(
                f"PeakByCause works on virtual GPUs, but the model is on {self._device}: "
                'move it to one first, as in model.to("vgpu:0")'
            )
        self.by_cause = dict.fromkeys(CAUSES, 0)
        self.parts: list[dict[str, int]] = []
        self._divisions = [0]  # where parts start, as indices of the GPU's events
        self._is_stepping = False
        self._hooks: list[Any] = []
        self._cause_of: dict[int, str] = {}  # by a block's number in the record
        self._before: dict[int, int] = {}  # bytes of the blocks that exist when the step starts
        self._hooked: dict[int, torch.Tensor] = {}

    @property
    def total_bytes(self) -> int:
        return sum(self.by_cause.values())

    def __enter__(self) -> Self:
        self._recording = vgpu.record_memory(self._cause_now)
        self._record = self._recording.__enter__()
        parameters = list(self._model.parameters())
        for cause, tensors in (
            (PARAMETERS, [*parameters, *self._model.buffers()]),
            (STATE, self._state()),
            (GRADIENTS, [parameter.grad for parameter in parameters]),
        ):
            for number, size_bytes in self._know(cause, tensors):
                self._before[number] = size_bytes
        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._on_forward))
        for parameter in parameters:
            self._hook(parameter)
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(self._on_step))
            self._hooks.append(self._optimizer.register_step_post_hook(self._after_step))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._recording.__exit__(*exc_info)
        for hook in self._hooks:
            hook.remove()
        self._know(GRADIENTS, [parameter.grad for parameter in self._model.parameters()])
        self._know(STATE, self._state())
        events = self._record.events_on(self._device)
        for bounds in itertools.pairwise([*self._divisions, len(events)]):
            self.parts.append(self._at_peak(events, *bounds))
        self.by_cause = max(self.parts, key=lambda part: sum(part.values()))
        # Don't keep anything from the step alive.
        del self._model, self._optimizer, self._record, self._recording, self._hooks, self._hooked

    def divide(self) -> None:
        """End a part of the step, and start the next; raise RuntimeError outside the step."""
        if not hasattr(self, "_record"):
            raise RuntimeError("divide() works only while the step runs, inside the with block")
        self._divisions.append(len(self._record.events_on(self._device)))

    def _state(self) -> list[Any]:
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        return [value for state in states for value in state.values()]

    def _know(self, cause: str, tensors: Iterable[Any]) -> list[tuple[int, int]]:
        """Set the cause of tensors without one; return the numbers and bytes of their blocks."""
        blocks = []
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, VirtualTensor) and local.device == self._device:
                block = block_of(local)
                if block.size_bytes:
                    number = self._record.number_of(block)
                    if number not in self._cause_of:
                        self._cause_of[number] = cause
                        blocks.append((number, block.size_bytes))
        return blocks

    # While the step runs

    def _on_forward(self, module: nn.Module, args: object) -> None:
        """Mark a module's parameters as gathered if FSDP2 has gathered them by now."""
        for parameter in module.parameters(recurse=False):
            self._know(GATHERED, [parameter])
            self._hook(parameter)

    def _hook(self, parameter: torch.Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in self._hooked:
            self._hooked[id(parameter)] = parameter
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._know(GRADIENTS, [parameter.grad])

    def _on_step(self, *of_optimizer: object) -> None:
        self._know(GRADIENTS, [parameter.grad for parameter in self._model.parameters()])
        self._is_stepping = True

    def _after_step(self, *of_optimizer: object) -> None:
        self._know(STATE, self._state())
        self._is_stepping = False

    def _cause_now(self) -> str:
        """Return the cause of the block being allocated, as far as the call stack shows it."""
        of_wrappers = _of_wrappers()
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if cause := of_wrappers.get(frame.f_code):
                return cause
        # Recomputation runs forward inside a backward pass, with gradients enabled.
        flows_back = in_backward() and not torch.is_grad_enabled()
        return TEMPORARY if flows_back or self._is_stepping else ACTIVATIONS

    # After the step

    def _at_peak(self, events: list[MemoryEvent], start: int, end: int) -> dict[str, int]:
        """Return the bytes by cause at the peak between two events."""
        # Ask the record: garbage or another thread may free blocks just after it starts.
        before_bytes = self._record.bytes_before(self._device)

        def level(at: int) -> int:
            return events[at].allocated_bytes if at >= 0 else before_bytes

        last = max(range(start - 1, end), key=level)  # -1 is before the first event
        held, labels = dict(self._before), dict[int, str]()
        unknown_bytes = before_bytes - sum(held.values())
        for event in events[: last + 1]:
            if event.block not in held:  # a new block, or an unknown one from before
                unknown_bytes -= event.block_bytes - event.size_bytes
            held[event.block] = event.block_bytes
            if event.size_bytes > 0:
                labels[event.block] = event.label
        by_cause = {**dict.fromkeys(CAUSES, 0), OTHER: unknown_bytes}
        for number, size_bytes in held.items():
            by_cause[self._cause_of.get(number) or labels.get(number, OTHER)] += size_bytes
        return by_cause


@functools.cache
def _of_wrappers() -> dict[CodeType, str]:
    """Return the causes of memory that FSDP2's and DDP's functions allocate, by code object."""
    causes: dict[Callable[..., Any], str] = {
        collectives.foreach_all_gather: GATHERED,
        collectives.foreach_all_gather_copy_out: GATHERED,
        FSDPParam.init_all_gather_outputs: GATHERED,
        FSDPParam.init_unsharded_param: GATHERED,
        FSDPParam.alloc_all_gather_outputs: GATHERED,
        collectives.foreach_reduce: GRADIENTS,
        torch_releases.widens_gradients(FSDPParam, FSDPParamGroup): GRADIENTS,
        DistributedDataParallel._pre_forward: OTHER,  # buckets, in the second step
    }
    return {inspect.unwrap(function).__code__: cause for function, cause in causes.items()}
