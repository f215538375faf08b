"""Checks for the exam's first tasks: devices, autograd, training, DataParallel."""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from helpers import devices
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input


@exercise("99.1", "What is elsewhere")
def elsewhere(answer: Callable[[nn.Module, torch.device], list[str]]) -> dict[str, Any]:
    gpus = devices.lab(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].register_buffer("scale", torch.ones(2), persistent=False)
    model[0].to(gpus[0])
    model[1].to(gpus[1])
    model[2].weight.data = model[2].weight.data.to(gpus[0])  # its bias stays on the CPU
    first, second = _named_on(model, gpus[0]), _named_on(model, gpus[1])
    api = torch.get_device_module(gpus[0])
    for device, current, expected in (
        (gpus[0], 0, [*second, "2.bias"]),
        (gpus[1], 0, [*first, "2.bias"]),
        (torch.device(gpus[0].type), 1, [*first, "2.bias"]),
    ):
        given = f"device {device}, while GPU {current} is current"
        with for_input(given, "Return names, as a list."), api.device(current):
            yours = answer(model, device)
            hint = "Return the names that named_parameters() and named_buffers() use."
            if device.index is None:
                hint = (
                    "A device without an ordinal means the current one, but doesn't equal any "
                    "tensor's device."
                )
            elif isinstance(yours, list) and set(expected) - set(yours) == {"0.scale"}:
                hint = "A buffer is missing: state_dict() leaves out those with persistent=False."
            elif isinstance(yours, list) and set(yours) < set(expected):
                hint = "Some are missing. A module holds other tensors besides its parameters."
            expect_equal(
                sorted(yours) if isinstance(yours, list) else yours, sorted(expected), hint=hint
            )
    return {"found": f"{len(expected)} tensors that were elsewhere, also for {device}"}


def _named_on(model: nn.Module, device: torch.device) -> list[str]:
    named = *model.named_parameters(), *model.named_buffers()
    return [name for name, tensor in named if tensor.device == device]


@exercise("99.2", "Round, with a gradient")
def rounded(answer: Callable[[torch.Tensor, float], torch.Tensor]) -> dict[str, Any]:
    for step in (1.0, random.choice((0.25, 0.125))):
        x = torch.randn(6).mul(3).requires_grad_()
        before, weights = x.detach().clone(), torch.randn(6)
        given = f"step {step} and {x.tolist()}"
        with for_input(given, "The values are rounded; the gradient passes as if they weren't."):
            yours = answer(x, step)
            values = torch.round(before / step) * step
            expect_close(yours.detach(), values, hint="Return the nearest multiples of step.")
            if not torch.equal(x.detach(), before):
                raise Wrong(
                    yours="the input itself, rounded",
                    expected="an unchanged input",
                    hint="Writing to .data changes what everyone else reads.",
                )
            if not yours.requires_grad:
                raise Wrong(
                    yours="a result outside the graph",
                    expected="a result with a gradient",
                    hint="Detach only the correction, not the whole result.",
                )
            (yours * weights).sum().backward()
            expect_close(
                x.grad,
                weights,
                hint="round has a gradient of 0. Apply it to a part that autograd doesn't see.",
            )
            if _has_function(yours):
                raise Wrong(
                    yours="the right gradient, from a torch.autograd.Function",
                    expected="the right gradient, without one",
                    hint="Add to x what rounding changes, as a part that autograd doesn't see.",
                )
    return {"gradient": "the identity's", "values": f"multiples of {step}"}


def _has_function(result: torch.Tensor) -> bool:
    """Return whether a result's graph has a step whose backward is written in Python."""
    found = [result.grad_fn]
    for node in found:  # grows during the loop
        following = (other for other, _ in node.next_functions) if node else ()
        found += [other for other in following if other not in found]
    return any(isinstance(node, BackwardCFunction) for node in found)


@exercise("99.3", "An average of the weights")
def average_of_weights(answer: Callable[[nn.Module, nn.Module, float], Any]) -> dict[str, Any]:
    (gpu,) = devices.lab(1)
    decay = random.choice((0.5, 0.75))
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).to(gpu)
    average = copy.deepcopy(model).cpu()
    places = {name: tensor.data_ptr() for name, tensor in average.state_dict().items()}
    expected = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.randn(8, 3, device=gpu) + 2).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        trained = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        for name, tensor in trained.items():
            mixed = decay * expected[name] + (1 - decay) * tensor
            expected[name] = mixed if tensor.is_floating_point() else tensor
        given = f"decay {decay}, after step {step}; the model on {gpu}, the average on the CPU"
        with for_input(given, "Work without a graph, in place, on the average's device."):
            answer(average, model, decay)
            for name, tensor in average.state_dict().items():
                expect_close(tensor, expected[name], given=f"{name}; {given}", hint=_mixed(name))
            now = {name: tensor.data_ptr() for name, tensor in average.state_dict().items()}
            if now != places:
                raise Wrong(
                    yours="new tensors in the average",
                    expected="the same tensors, changed in place",
                    hint="Anyone who holds the average's tensors would keep the old values.",
                )
            for name, tensor in model.state_dict().items():
                expect_equal(tensor.cpu(), trained[name], hint="The model itself must not change.")
    return {"average": f"correct after {step} steps, in {len(places)} tensors"}


def _mixed(name: str) -> str:
    if "num_batches" in name:
        return "Don't average a count: take the model's."
    if "running" in name:
        return "Buffers, too, affect what the averaged model computes."
    return "decay is the weight of the old average."


@exercise("99.4", "BatchNorm's statistics under DataParallel")
def statistics_under_data_parallel(
    answer: Callable[[torch.Tensor, int, float], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    gpus = devices.lab(8)
    for count, samples, momentum in ((2, 8, 0.1), (4, 14, 0.3), (8, 23, 0.2)):
        x = torch.randn(samples, 3) * 2 + torch.arange(samples)[:, None]
        norm = nn.BatchNorm1d(3, momentum=momentum).to(gpus[0])
        nn.DataParallel(norm, gpus[:count])(x.to(gpus[0]))
        assert norm.running_mean is not None and norm.running_var is not None
        expected = norm.running_mean.cpu(), norm.running_var.cpu()
        given = f"{samples} samples on {count} GPUs, momentum {momentum}"
        with for_input(given, "Return two tensors: the running mean and the running variance."):
            mean, variance = answer(x, count, momentum)
            whole = torch.allclose(mean, momentum * x.mean(0))
            hint = "Which replica's buffers are the module's own? And how many samples does it get?"
            if whole:
                hint = "No GPU sees the full batch. Whose writes to the buffers are kept?"
            expect_close(mean, expected[0], hint=hint)
            expect_close(
                variance,
                expected[1],
                hint="It starts at 1, keeps 1 - momentum of that, and adds momentum times the "
                "unbiased variance.",
            )
    return {"predicted": "PyTorch's own mean and variance, on 2, 4 and 8 GPUs"}
