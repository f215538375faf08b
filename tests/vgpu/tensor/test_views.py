"""Views, shapes changed in place, and versions: autograd handles them as on the CPU."""

import pytest
import torch

pytestmark = pytest.mark.virtual_gpus(2)


def weights(*shape, like):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to(like.device)


def transposed_base(x):
    base = x * 1
    row = base[0]
    base.t_()
    return (row * weights(3, like=x)).sum()


def row_written_after_the_base_was_transposed(x):
    base = x * 1
    row = base[0]
    base.t_()
    row.mul_(2)
    return (base * weights(3, 4, like=x)).sum()


def unsqueezed_base(x):
    base = x * 1
    wider = base.unsqueeze(0)
    base.unsqueeze_(1)
    wider.mul_(3)
    return (base * weights(4, 1, 3, like=x)).sum() + wider[0, 1].sum()


def transposed_view_of_a_changed_base(x):
    base = x * 1
    view = base[0:2]
    view.t_()
    base.mul_(2)
    return (view * weights(3, 2, like=x)).sum()


def squeezed_view(x):
    base = x * 1
    view = base[:1]
    row = view[0]
    view.squeeze_(0)
    row.mul_(2)
    view.mul_(3)
    return (base * weights(4, 3, like=x)).sum()


def restrided_base(x):
    base = x * 1
    part = base[2:]
    base.as_strided_((2, 2), (1, 2))
    return (part * weights(2, 3, like=x)).sum() + base.square().sum()


def view_squeezed_before_its_base_requires_a_gradient(x):
    base = torch.zeros(1, 3, device=x.device)
    view = base.swapaxes(0, 1)
    with torch.no_grad():
        view.squeeze_()
    base.copy_(x[:1])
    return (view * weights(3, like=x)).sum()


def complex_base(x):
    base = torch.complex(x, x * 2)
    column = base[:, 1]
    base.t_()
    column.mul_(2)
    return (base.abs() * weights(3, 4, like=x)).sum()


def values_of_a_sparse_base(x):
    values = (x * 1).to_sparse().coalesce().values()
    with torch.no_grad():
        values.squeeze_()
    return (values.detach() * x.reshape(-1)).sum()


def view_of_a_base_that_was_given_other_data(x):
    base = x * 1
    view = base[0:2]
    base.data = x.detach() * 2
    base.t_()
    return view.square().sum()


def transposed_view_of_a_base_that_was_given_other_data(x):
    base = x * 1
    view = base[0:2]
    base.data = x.detach() * 2
    with torch.no_grad():
        view.t_()
    return view.square().sum()


def resized_base(x):
    base = torch.zeros(4, 3, device=x.device)
    row = base[1]
    base.resize_(6)
    base.copy_(x.reshape(-1)[:6])
    return (row * weights(3, like=x)).sum()


def imaginary_part_of_a_transposed_base(x):
    base = torch.complex(x[:3], x[:3] * 2)
    part = base.imag
    base.t_()
    part.mul_(3)
    return (part * weights(3, 3, like=x)).sum() + (base.abs() * weights(3, 3, like=x)).sum()


PROGRAMS = [
    transposed_base,
    row_written_after_the_base_was_transposed,
    unsqueezed_base,
    transposed_view_of_a_changed_base,
    squeezed_view,
    restrided_base,
    view_squeezed_before_its_base_requires_a_gradient,
    complex_base,
    imaginary_part_of_a_transposed_base,
    resized_base,
    values_of_a_sparse_base,
    view_of_a_base_that_was_given_other_data,
    transposed_view_of_a_base_that_was_given_other_data,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_view_stays_a_view_when_a_shape_changes_in_place(program):
    gradients = []
    for device in ("cpu", "vgpu:1"):
        x = torch.arange(1.0, 13).reshape(4, 3).to(device).requires_grad_()
        program(x).backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_a_view_of_a_leaf_cannot_be_changed_in_place():
    for device in ("cpu", "vgpu:1"):
        leaf = torch.ones(2, 3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
            leaf[:1].squeeze_(0)


def test_the_error_names_a_view_that_retains_its_gradient():
    base = torch.ones(2, 3, device="vgpu:1", requires_grad=True) * 1
    row = base[0]
    row.retain_grad()
    with pytest.raises(RuntimeError, match=r"a view of size \(3,\) on vgpu:1 retains a gradient"):
        base.t_()


@pytest.mark.parametrize("device", ["cpu", "vgpu:1"])
def test_a_view_keeps_its_gradient(device):
    row = torch.ones(1, device=device).view(1)
    row.grad = torch.ones(1, device=device)
    row.t_()
    assert row.grad.item() == 1
    base = torch.ones(2, 3, device=device)
    first, column = base[0], base[:, :1]
    first.grad, column.grad = first * 2, column * 3
    base.t_()
    column.squeeze_(1)
    assert first.grad.tolist() == [2, 2, 2]
    assert column.grad.tolist() == [[3], [3]]
    base.zero_()
    assert column.tolist() == [0, 0]


@pytest.mark.parametrize("device", ["cpu", "vgpu:1"])
def test_a_gradient_that_is_a_view_changes_its_shape(device):
    flat = torch.zeros(3, device=device)
    x = torch.ones(1, 3, device=device, requires_grad=True)
    x.grad = flat.view(1, 3)
    x.grad.transpose_(0, 1)
    assert x.grad.shape == (3, 1)
    x.grad.fill_(5)
    assert flat.tolist() == [5, 5, 5]
    x.grad = flat.view(1, 3)
    flat.unsqueeze_(0)
    (x * 2).sum().backward()
    assert flat.tolist() == [[7, 7, 7]]
    flat.mul_(2)
    assert x.grad.tolist() == [[14, 14, 14]]


def test_the_error_names_a_view_with_a_hook():
    row = (torch.ones(2, 2, device="vgpu:1", requires_grad=True) * 1)[:1]
    row.register_hook(lambda gradient: gradient * 3)
    with pytest.raises(RuntimeError, match=r"a view of size \(1, 2\) on vgpu:1 has a hook"):
        row.t_()


def test_hooks_before_and_after_a_change_belong_to_the_same_graphs_as_on_the_cpu():
    found = []
    for device in ("cpu", "vgpu:1"):
        x = torch.ones(2, 1, device=device, requires_grad=True)
        view = (x * 1)[:]
        view.register_hook(lambda gradient: gradient * 3)
        before = view.sum()
        with torch.no_grad():
            view.squeeze_()
        view.register_hook(lambda gradient: gradient * 5)
        gradients = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in (before, view.sum())]
        found.append([gradient.tolist() for gradient in gradients])
    on_cpu, on_gpu = found
    # Since torch 2.15, the later hook belongs to the later graph; before that, both hooks
    # belonged to the earlier graph.
    assert on_gpu == on_cpu
    assert on_cpu in ([[[3], [3]], [[5], [5]]], [[[15], [15]], [[1], [1]]])


def test_a_shape_change_increments_the_version():
    for device in ("cpu", "vgpu:1"):
        base = torch.ones(2, 3, device=device)
        view = base[0]
        before = base._version
        base.t_()
        view.unsqueeze_(0)
        assert base._version == view._version == before + 2


FOREACH = {
    "add": lambda values: torch._foreach_add_(values, 1),
    "mul": lambda values: torch._foreach_mul_(values, [2.0, 3.0]),
    "sqrt": torch._foreach_sqrt_,
    "zero": torch._foreach_zero_,
    "copy": lambda values: torch._foreach_copy_(values, [torch.ones_like(v) for v in values]),
    "addcdiv": lambda values: torch._foreach_addcdiv_(values, values, values, 0.5),
    "lerp": lambda values: torch._foreach_lerp_(values, [torch.zeros_like(v) for v in values], 0.5),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_increments_versions_so_that_backward_raises(name):
    for device in ("cpu", "vgpu:1"):
        values = [torch.full((2,), 4.0, device=device, requires_grad=True) for _ in range(2)]
        loss = sum(value.square().sum() for value in values)
        with torch.no_grad():
            FOREACH[name](values)
        assert [value._version for value in values] == [1, 1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        # After an error, autograd's queue keeps unfinished work until the next backward.
        torch.ones((), requires_grad=True).backward()


@pytest.mark.parametrize("shape", [(10,), (10, 5)])
def test_matmul_of_a_batch_writes_to_out(shape):
    # torch multiplies the batch as one matrix, into a view of out with another shape.
    left, right = torch.randn(4, 3, 10), torch.randn(shape)
    out = torch.zeros_like(left @ right, device="vgpu")
    assert torch.matmul(left.to("vgpu"), right.to("vgpu"), out=out) is out
    torch.testing.assert_close(out.cpu(), left @ right)


def test_a_copy_to_the_same_memory_in_another_shape_is_rejected():
    x = torch.arange(12.0, device="vgpu").view(4, 3)
    with pytest.raises(RuntimeError):
        x.copy_(x.view(3, 4))
