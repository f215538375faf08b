"""Shapes changed in place, and versions: autograd notices them as on the CPU."""

import pytest
import torch

pytestmark = pytest.mark.virtual_gpus(2)


def test_a_shape_changes_in_place_unless_other_tensors_share_its_memory():
    x = torch.arange(6.0, device="vgpu:1").reshape(2, 3).clone().requires_grad_()
    y = x * 2
    y.t_().unsqueeze_(0)
    assert y.shape == (1, 3, 2) and y._version == 2
    y[0, 1].sum().backward()
    assert x.grad.tolist() == [[0, 2, 0], [0, 2, 0]]
    y = x * 2
    view = y[0]
    for tensor, change in ((y, "t_"), (view, "squeeze_"), (x.data, "t_")):
        with pytest.raises(RuntimeError, match=f"^{change}: a tensor of size .* on vgpu:1 shares"):
            getattr(tensor, change)()
    assert torch.zeros(2, 3, device="vgpu:1").resize_(6).shape == (6,)


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
def test_foreach_counts_versions_so_that_backward_notices(name):
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
