"""``torch.inference_mode()``, which skips autograd and doesn't decompose operators."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.virtual_gpus(3)
DEVICE = "vgpu:1"


def test_to_moves_inference_tensors_as_on_the_cpu():
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    with torch.inference_mode():
        assert x.to(torch.ones(1)).device.type == "cpu"
        moved = x.to("vgpu:2")
        assert str(moved.device) == "vgpu:2"
        assert type(moved._inner) is torch.Tensor
        assert moved.tolist() == x.tolist()
        assert x.to(DEVICE) is x
        assert x.float() is x
        assert x.contiguous() is x
        assert x.double().dtype is torch.float64


VIEWS = {
    "item": lambda x: x[0],
    "slice": lambda x: x[:, 1:],
    "transposed": lambda x: x.t(),
    "reshaped": lambda x: x.reshape(-1),
    "split": lambda x: x.split(1)[1],
    "expanded": lambda x: x.unsqueeze(0).expand(2, 2, 3),
    "new": lambda x: x * 2,
    "view of new": lambda x: (x * 2)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_tensors_from_outside_and_inside_inference_mode_are_distinguished(name):
    for device in ("cpu", DEVICE):
        outside = torch.arange(6.0).reshape(2, 3).to(device)
        with torch.inference_mode():
            inside = outside + 0
            found = VIEWS[name](outside)
            assert found.is_inference() == (name in ("new", "view of new"))
            assert VIEWS[name](inside).is_inference()
        again = VIEWS[name](inside)
        assert again.is_inference() == (name not in ("new", "view of new"))
        assert torch.equal(found.cpu(), VIEWS[name](torch.arange(6.0).reshape(2, 3)))


def test_writing_to_an_inference_tensor_outside_inference_mode_is_rejected():
    with torch.inference_mode():
        y = torch.ones(3, device=DEVICE) * 2
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        y.add_(1)


def test_a_module_can_be_moved_and_called_on_slices():
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.LayerNorm(4), nn.Linear(4, 2))
        batch = torch.arange(12.0).reshape(4, 3).to(device)
        weight = model[0].weight
        with torch.inference_mode():
            for target in ("vgpu:0", device) if device == DEVICE else (device,):
                model.to(target).eval()
                assert model[0].weight is weight
            out = torch.cat([model(part) for part in (batch[:2], batch[2:])])
        if device == "cpu":
            expected = out
        assert isinstance(model[0].weight, nn.Parameter)
    assert str(out.device) == DEVICE
    torch.testing.assert_close(out.cpu(), expected)
