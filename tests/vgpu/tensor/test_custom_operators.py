"""Custom operators: their Python kernels run on virtual tensors, as on a GPU."""

import pytest
import torch

import vgpu

GPU = "vgpu:0"


pytestmark = pytest.mark.virtual_gpus(2)


@torch.library.custom_op("customs::everywhere", mutates_args=())
def everywhere(x: torch.Tensor) -> torch.Tensor:
    room = torch.empty(2**20, dtype=torch.uint8, device=x.device)
    noise = torch.rand(2, device=x.device)
    return x @ x + (room[0] * 0 + (0 if x.device.type == "cpu" else 1)) + noise


@everywhere.register_fake
def _(x):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad @ x.mT + x.mT @ grad


everywhere.register_autograd(_gradient, setup_context=_keep)


def _by_rows(info, in_dims, x):
    return torch.stack([everywhere(one) for one in x.unbind(in_dims[0])]), 0


everywhere.register_vmap(_by_rows)


@torch.library.custom_op("customs::adds", mutates_args=("y",))
def adds(x: torch.Tensor, y: torch.Tensor) -> None:
    y.add_(x)


@torch.library.custom_op("customs::alias", mutates_args=())
def alias(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


@torch.library.custom_op("customs::host_only", mutates_args=(), device_types="cpu")
def host_only(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_kernel_for_all_devices_runs_on_the_gpu():
    torch.manual_seed(0)
    noise = torch.rand(2, device=GPU)
    torch.manual_seed(0)
    torch.vgpu.reset_peak_memory_stats()
    result = everywhere(torch.zeros(2, 2, device=GPU))
    assert torch.equal(result.cpu(), noise.cpu().expand(2, 2) + 1)
    assert torch.vgpu.max_memory_allocated() > 2**20


def test_the_parts_of_a_custom_operator_take_time():
    x = torch.zeros(2, 2, device=GPU)
    with vgpu.record() as timeline:
        everywhere(x)
    names = {event.name for event in timeline.events}
    assert {"mm", "uniform_"} <= names
    assert not any("everywhere" in name for name in names)


def test_custom_operators_work_with_autograd_vmap_autocast_and_shapes():
    x = torch.ones(2, 2, device=GPU, requires_grad=True)
    everywhere(x).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((2, 2), 4.0))
    assert torch.vmap(everywhere)(torch.zeros(3, 2, 2, device=GPU)).shape == (3, 2, 2)
    with torch.autocast("vgpu", torch.bfloat16):
        assert torch.equal(everywhere(x.detach()).cpu() > 2, torch.ones(2, 2, dtype=torch.bool))
    with vgpu.shapes_only():
        assert everywhere(torch.zeros(2, 2, device=GPU)).shape == (2, 2)


def test_the_gpu_kernel_is_called():
    library = torch.library.Library("customs_two", "DEF")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x + 1, "CPU")
    with pytest.raises(NotImplementedError, match=r"customs_two::f.*VGPU.*only.*CPU"):
        torch.ops.customs_two.f(torch.zeros(2, device=GPU))
    library.impl("f", lambda x: x + 100, "PrivateUse1")
    assert torch.ops.customs_two.f(torch.zeros(2, device=GPU)).tolist() == [100, 100]
    assert torch.ops.customs_two.f(torch.zeros(2)).tolist() == [1, 1]


def test_an_operator_with_only_a_cpu_kernel_is_rejected():
    with pytest.raises(NotImplementedError, match=r"'customs::host_only'.*'VGPU' backend"):
        host_only(torch.zeros(2, device=GPU))
    assert host_only(torch.zeros(1)).item() == 1


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_custom_operator_counts_its_mutations_and_rejects_aliases(device):
    y = torch.zeros(2, device=device)
    before = y._version
    adds(torch.ones(2, device=device), y)
    assert y._version - before == 2  # the kernel's own change and the operator's
    with pytest.raises(RuntimeError, match=r"must not also be an input"):
        alias(torch.ones(2, 2, device=device))


def test_a_cpp_operator_computes_as_before():
    ops = pytest.importorskip("torchvision.ops")
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2.1]], device=GPU)
    kept = ops.nms(boxes, torch.tensor([0.5, 0.9], device=GPU), 0.5)
    assert (kept.device, kept.tolist()) == (torch.device(GPU), [1])
