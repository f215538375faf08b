"""Measure what operations cost on virtual GPUs: µs of dispatch, a training step, bytes of a tensor.

The peers are torch's own tensors written in Python, FakeTensorMode (shapes only, like
``shapes_only``) and TwoTensor (a wrapper that computes, like a virtual tensor), and plain CPU
tensors. They take turns, so that a busy moment of the machine affects all of them; ratios compare
measurements from the same round. In each turn, the fastest of multiple short bursts counts, since
it wasn't interrupted.
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import vgpu

ROUNDS, BURSTS, CALLS = 9, 40, 50
RESNET_ROUNDS = 5
TENSORS = 100_000
VIRTUAL, CPU, FAKE, TWO = "virtual GPU", "plain CPU tensors", "FakeTensorMode", "TwoTensor"

Calls = tuple[Callable[[], object], Callable[[], object]]  # x + x; forward and backward
Case = Callable[[], AbstractContextManager[Calls]]


def network() -> nn.Module:
    """Return 12 modules, small enough that dispatch dominates, not arithmetic."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(6)])


def calls(values: torch.Tensor, model: nn.Module, batch: torch.Tensor) -> Calls:
    def step() -> None:
        model.zero_grad()
        model(batch).sum().backward()

    return lambda: values + values, step


def case(device: str, *blocks: Callable[[], AbstractContextManager]) -> Case:
    """Return the calls with everything on ``device``, inside ``blocks``."""

    @contextmanager
    def inside() -> Iterator[Calls]:
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block())
            values, batch = torch.ones(4, 4).to(device), torch.ones(4, 8).to(device)
            # FakeTensorMode can't move a module, not even to the device where it already is.
            model = network() if device == "cpu" else network().to(device)
            yield calls(values, model, batch)

    return inside


def two(tensor: torch.Tensor) -> TwoTensor:
    return TwoTensor(tensor, tensor.clone())


@contextmanager
def two_tensors() -> Iterator[Calls]:
    model = network()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(two(parameter.detach())))
    yield calls(two(torch.ones(4, 4)), model, two(torch.ones(4, 8)))


CASES: dict[str, Case] = {
    CPU: case("cpu"),
    VIRTUAL: case("vgpu:0"),
    "virtual GPU, record()": case("vgpu:0", vgpu.record),
    "virtual GPU, shapes_only()": case("vgpu:0", vgpu.shapes_only),
    "virtual GPU, record() and shapes_only()": case("vgpu:0", vgpu.shapes_only, vgpu.record),
    FAKE: case("cpu", FakeTensorMode),
    TWO: two_tensors,
}


def seconds(call: Callable[[], object], times: int) -> float:
    """Return the seconds of one call, as the mean of multiple calls in a row."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def fastest(call: Callable[[], object], times: int, bursts: int) -> float:
    """Return the seconds of one call in the fastest burst of ``times`` calls."""
    return min(seconds(call, times) for _ in range(bursts))


def measure() -> dict[str, list[tuple[float, float]]]:
    """Return (µs of x + x, ms of a step) for each case in every round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name, inside in CASES.items():
            with inside() as (add, step):
                step()  # the first step fills caches
                add_s, step_s = fastest(add, CALLS, BURSTS), fastest(step, 1, BURSTS // 4)
                found[name].append((add_s * 1e6, step_s * 1e3))
    return found


def spread(values: list[float], digits: int = 1) -> str:
    """Format the median, and the range of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratios(ours: list[float], theirs: list[float]) -> str:
    return spread([one / other for one, other in zip(ours, theirs, strict=True)], 2)


def resnet_steps(device: str) -> Callable[[], None]:
    """Return a ResNet-50 training step with a batch of 8 images of 128x128 on ``device``."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(8, 3, 128, 128).to(device), torch.arange(8).to(device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    return step


def resident_bytes(kind: str) -> float:
    """Return the resident memory of a one-element tensor in this process, including its value."""
    with ExitStack() as stack:
        stack.enter_context(vgpu.enable(1))
        if kind == "shape":
            stack.enter_context(vgpu.shapes_only())
        source = torch.ones(1).to("cpu" if kind == "cpu" else "vgpu:0")
        kept = [source + 1]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kept += [source + 1 for _ in range(TENSORS)]
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * (1 if sys.platform == "darwin" else 1024) / TENSORS


def in_new_process(kind: str) -> float:
    program = f"from {__spec__.name} import resident_bytes; print(resident_bytes({kind!r}))"
    command = [sys.executable, "-W", "ignore", "-c", program]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> str:
    torch.set_num_threads(1)
    cpu_bytes, virtual_bytes, shape_bytes = map(in_new_process, ("cpu", "vgpu", "shape"))
    with vgpu.enable(2):
        found = measure()
        steps = {device: resnet_steps(device) for device in ("cpu", "vgpu:0")}
        taken: dict[str, list[float]] = {device: [] for device in steps}
        for _ in range(RESNET_ROUNDS):
            for device, step in steps.items():
                taken[device].append(seconds(step, 1))
    adds, whole = ({n: [v[i] for v in values] for n, values in found.items()} for i in (0, 1))
    rows = "\n".join(
        f"| {name} | {spread(adds[name])} | {ratios(adds[name], adds[VIRTUAL])} "
        f"| {spread(whole[name], 2)} | {ratios(whole[name], whole[VIRTUAL])} |"
        for name in CASES
    )
    return (
        "## An operation on a virtual GPU\n\nOne thread runs `x + x` on 4x4 tensors, and forward "
        f"and backward through 12 small modules. The rows take turns, in {ROUNDS} rounds; in a "
        f"round, what counts is the fastest of {BURSTS} bursts of {CALLS} operations, and the "
        f"fastest of {BURSTS // 4} steps. The table has the median over the rounds, with the "
        "middle half in parentheses. Ratios are relative to a virtual GPU in the same round. The "
        "aim is at most 8 µs for an operation on shapes.\n\n| | x + x, µs | ratio | step, ms | "
        f"ratio |\n|---|---|---|---|---|\n{rows}\n\nAn operation on a virtual GPU takes "
        f"{ratios(adds[VIRTUAL], adds[FAKE])} of FakeTensorMode's time (aim: at most 0.25).\n\nA "
        "ResNet-50 training step on 8 images of 128x128, measured in turns, takes "
        f"{spread(taken['cpu'], 2)} s on the CPU and {spread(taken['vgpu:0'], 2)} s on a virtual "
        f"GPU, {ratios(taken['vgpu:0'], taken['cpu'])} times as long (aim: at most 1.15).\n\nA "
        f"one-element tensor takes {cpu_bytes:.0f} bytes of resident memory on the CPU, "
        f"{virtual_bytes:.0f} on a virtual GPU and {shape_bytes:.0f} as a shape, including its "
        "value. A larger tensor takes correspondingly more.\n"
    )


if __name__ == "__main__":
    print(main())
