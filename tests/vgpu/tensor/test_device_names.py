"""Inside torch.func's transforms, a tensor reports its GPU, as it does outside."""

import pytest
import torch

pytestmark = pytest.mark.virtual_gpus(2)

GPU = "vgpu:1"


def in_grad(function):
    """Return the result of ``function`` for a tensor on GPU 1, inside ``torch.func.grad``."""
    found = []
    torch.func.grad(lambda x: (found.append(function(x)), x.sum())[1])(torch.ones(2, device=GPU))
    return found[0]


def in_vmap(function):
    found = []
    torch.func.vmap(lambda x: (found.append(function(x)), x)[1])(torch.ones(3, 2, device=GPU))
    return found[0]


def nested(function):
    return in_vmap(lambda x: in_grad(function))


@pytest.mark.parametrize("inside", [in_grad, in_vmap, nested])
def test_a_virtual_device_shows_its_name(inside):
    assert inside(lambda x: x.device) == torch.device(GPU)
    assert inside(lambda x: x.get_device()) == 1
    assert inside(lambda x: x.is_vgpu)
    assert inside(lambda x: torch.ones(2).device) == torch.device("cpu")


@pytest.mark.parametrize(
    "add",
    [
        lambda x: x + x.new_tensor([1, 2]),
        lambda x: x + x.new_tensor([1, 2], dtype=torch.float64),
        lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x + torch.arange(1, 3, device=x.device),
        lambda x: x + torch.tensor([1.0, 2.0]).to(x.device),
    ],
)
def test_new_tensors_are_created_on_the_virtual_device(add):
    x = torch.ones(3, 2, device=GPU)
    found = torch.func.vmap(add)(x)
    assert found.device == torch.device(GPU) and torch.equal(
        found.cpu(), torch.func.vmap(add)(x.cpu())
    )


def test_autocast_accepts_the_virtual_device_type():
    def product(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return x @ torch.ones(2, 2, device=x.device)

    assert torch.func.vmap(product)(torch.ones(3, 2, device=GPU)).dtype is torch.bfloat16
