"""torch's own optimizer configurations (optim_db): every step and all state match the CPU's."""

import copy

import pytest
import torch
from conformance.comparison import DEVICE, check_same, tensors_of
from conformance.suites import (
    OptimizerInfo,
    OptimizerInput,
    optim_db,
    optimizer_inputs,
    sampled,
)

STEPS = 3


def _dtypes(info: OptimizerInfo) -> list[torch.dtype]:
    return [torch.float32, torch.complex64] if info.supports_complex else [torch.float32]


def _entries() -> dict[str, tuple[OptimizerInfo, OptimizerInput, torch.dtype]]:
    """Every configuration, alone and with each of foreach, fused and differentiable."""
    entries = {}
    for info in optim_db:
        for dtype in _dtypes(info):
            for number, options in enumerate(optimizer_inputs("cpu", dtype, info)):
                if dtype.is_complex and options.kwargs.get("fused"):
                    continue  # torch rejects this on every device
                name = f"{info.optim_cls.__name__}-{number}-{str(dtype).removeprefix('torch.')}"
                entries[name] = (info, options, dtype)
    return entries


ENTRIES = _entries()


class Problem:
    """A few parameters on one device, and a loss that pulls them toward targets."""

    def __init__(self, info: OptimizerInfo, options: dict, dtype: torch.dtype, device: str):
        self.info = info
        generator = torch.Generator().manual_seed(0)
        # Muon supports only matrices.
        shapes = [(5, 3), (4, 2)] if info.optim_cls is torch.optim.Muon else [(5, 3), (4,), (1,)]
        draws = [torch.randn(2, *shape, dtype=dtype, generator=generator) for shape in shapes]
        # A differentiable step writes to its parameters under autograd, which isn't allowed for
        # leaves.
        leaf = not options.get("differentiable")
        self.parameters = [draw[0].to(device).requires_grad_(leaf) for draw in draws]
        self.targets = [draw[1].to(device) for draw in draws]
        options = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in copy.deepcopy(options).items()
        }
        self.optimizer = info.optim_cls(self.parameters, **options)

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        leaves = [parameter.detach().requires_grad_() for parameter in self.parameters]
        pairs = zip(leaves, self.targets, strict=True)
        loss = sum((leaf - target).abs().square().sum() for leaf, target in pairs)
        for parameter, gradient in zip(
            self.parameters, torch.autograd.grad(loss, leaves), strict=True
        ):
            sparse = self.info.only_supports_sparse_grads
            parameter.grad = gradient.to_sparse() if sparse else gradient
        return loss

    def step(self) -> torch.Tensor:
        if self.info.step_requires_closure:
            return self.optimizer.step(self.closure)
        loss = self.closure()
        self.optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        """Return the optimizer's state, moved to the CPU; step counts may be there already."""
        remembered = [self.optimizer.state[parameter] for parameter in self.parameters]
        return [tensor.cpu() for tensor in tensors_of([dict(state) for state in remembered])]


@pytest.mark.parametrize("entry", sampled(ENTRIES).values(), ids=sampled(ENTRIES))
def test_optimizers_take_the_same_steps_as_on_the_cpu(entry):
    info, options, dtype = entry
    cpu = Problem(info, options.kwargs, dtype, "cpu")
    gpu = Problem(info, options.kwargs, dtype, DEVICE)
    for step in range(STEPS):
        expected, found = cpu.step(), gpu.step()
        check_same(found, expected, f"loss at step {step}")
        check_same(gpu.parameters, cpu.parameters, f"parameters after step {step}")
    torch.testing.assert_close(gpu.state(), cpu.state())
