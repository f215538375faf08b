"""Assigning another tensor's values to ``.data``, also across devices, as moving a module does."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.virtual_gpus(3)


def test_moving_a_module_keeps_its_parameter_objects():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    x = torch.randn(5, 3)
    old_graph = model(x).sum()
    model(x).sum().backward()
    grads = [p.grad.clone() for p in parameters]
    for target in ("vgpu:0", "vgpu:2", "cpu", "vgpu:1"):
        assert model.to(target) is model
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        for p, grad in zip(parameters, grads, strict=True):
            assert isinstance(p, nn.Parameter)
            assert str(p.device) == str(p.grad.device) == target
            torch.testing.assert_close(p.grad.cpu(), grad)
    before = parameters[0].detach().cpu()
    optimizer.step()
    torch.testing.assert_close(parameters[0].cpu(), before - 0.1 * grads[0])
    with pytest.raises(RuntimeError, match="created before its parameters were moved"):
        old_graph.backward()
    model.half()
    assert parameters[0].dtype == torch.float16
    assert parameters[0].device.index == 1


def test_assigning_data_moves_as_on_cuda():
    p = torch.ones(2, requires_grad=True)
    p.data = p.data.vgpu(1)
    assert p.device.index == 1
    (p * 3).sum().backward()
    assert p.grad.tolist() == [3, 3]
    p.data = torch.zeros(2)
    assert type(p) is torch.Tensor
    y = p * 2
    with pytest.raises(RuntimeError, match="not a leaf"):
        y.data = torch.ones(2, device="vgpu:0")
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"the gradient of a tensor of size \(2,\) on cpu"):
        p.grad.data = torch.ones(2, device="vgpu:0")


def test_hooks_of_a_parameter_move_with_it():
    layer = nn.Linear(2, 1)
    calls = []
    handle = layer.weight.register_hook(lambda grad: calls.append("hook") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append(str(p.grad.device)))
    for target in ("vgpu:1", "vgpu:2", "cpu"):
        layer.to(target).zero_grad()
        calls.clear()
        layer(torch.ones(1, 2, device=target)).backward()
        assert calls == ["hook", target]
        assert layer.weight.grad.tolist() == [[2, 2]]
    handle.remove()
    layer.to("vgpu:1").zero_grad()
    layer(torch.ones(1, 2, device="vgpu:1")).backward()
    assert layer.weight.grad.tolist() == [[1, 1]]


def test_assigned_data_shares_memory_but_not_its_shape():
    for device in ("cpu", "vgpu:1"):
        p, q = torch.zeros(2, 3, device=device), torch.ones(2, 3, device=device)
        p.data = q
        q.t_()
        q[0, 1] = 5
        assert (tuple(p.shape), tuple(q.shape)) == ((2, 3), (3, 2))
        assert p.tolist() == [[1, 1, 1], [5, 1, 1]]


def test_data_of_another_kind_can_be_assigned():
    for device in ("cpu", "vgpu:1"):
        z = torch.tensor([1 + 2j, 3], device=device)
        target = torch.zeros(2, dtype=torch.complex64, device=device)
        target.data = z.conj()
        assert target.is_conj()
        assert target.tolist() == [1 - 2j, 3]
        target.add_(1)  # the memory is shared, but the version counter isn't
        assert (z.tolist(), z._version, target._version) == ([2 + 2j, 4], 0, 1)
        target.data = z
        assert target._version == 1


def test_a_tensor_that_a_profiler_holds_cannot_be_moved_and_the_error_says_why():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        layer(x).sum().backward()
        before = [(p.detach().clone(), p.grad.clone()) for p in layer.parameters()]
        loss = layer(x).sum()
        with pytest.raises(RuntimeError, match="move the model before the profiler begins"):
            layer.to("vgpu:0")
        for parameter, (value, grad) in zip(layer.parameters(), before, strict=True):
            assert parameter.device == parameter.grad.device == torch.device("cpu")
            assert parameter.equal(value) and parameter.grad.equal(grad)
        loss.backward()  # nothing has moved
    assert layer.weight.grad.equal(2 * before[0][1])


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_module_moves_only_after_initialization():
    model = torch.nn.LazyLinear(4)
    for move in (lambda: model.to("vgpu:1"), lambda: model.vgpu(1)):
        with pytest.raises(ValueError, match="Call `forward` with a dummy batch"):
            move()
    with pytest.raises(
        RuntimeError, match="created on vgpu:1, a virtual GPU: create it on the CPU"
    ):
        torch.nn.LazyLinear(4, device="vgpu:1")
    with torch.device("vgpu:0"), pytest.raises(RuntimeError, match="created on vgpu:0"):
        torch.nn.LazyBatchNorm1d(affine=False)
    model(torch.ones(2, 3))
    assert model.to("vgpu:1")(torch.ones(2, 3, device="vgpu:1")).shape == (2, 4)
