"""Checkpoints from virtual GPUs have CUDA's format and work with every ``map_location``."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

import vgpu

pytestmark = pytest.mark.virtual_gpus(3)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data, weights_only=True, **options):
    return torch.load(io.BytesIO(data), weights_only=weights_only, **options)


LOCATIONS = {
    "none": (None, "vgpu:1"),
    "cpu": ("cpu", "cpu"),
    "name": ("vgpu:2", "vgpu:2"),
    "device": (torch.device("cpu"), "cpu"),
    "table": ({"vgpu:1": "vgpu:0"}, "vgpu:0"),
    "moving function": (lambda storage, tag: storage.vgpu("vgpu:2"), "vgpu:2"),
    "function": (lambda storage, tag: storage if tag == "vgpu:1" else None, "cpu"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", LOCATIONS)
def test_model_and_optimizer_are_loaded_where_map_location_says(name, weights_only):
    location, expected = LOCATIONS[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("vgpu:1")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3, device="vgpu:1")).square().sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = loaded(saved(state), weights_only, map_location=location)
    for key, value in model.state_dict().items():
        assert str(back["model"][key].device) == expected
        torch.testing.assert_close(back["model"][key].cpu(), value.cpu())
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert str(back["optimizer"]["state"][0]["exp_avg"].device) == expected
    torch.testing.assert_close(back["optimizer"]["state"][0]["exp_avg"].cpu(), moments.cpu())
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("vgpu:0")
    twin.load_state_dict(back["model"])
    torch.testing.assert_close(twin[0].weight.cpu(), model[0].weight.cpu())


def test_attributes_of_parameters_are_saved():
    weight = nn.Parameter(torch.ones(2, device="vgpu:1"))
    weight.tag = "first"
    for location in (None, "cpu", "vgpu:2"):
        back = loaded(saved(weight), weights_only=False, map_location=location)
        assert back.tag == "first"
        assert isinstance(back, nn.Parameter)
        assert str(back.device) == (location or "vgpu:1")


def test_a_cpu_checkpoint_loads_onto_a_virtual_gpu():
    back = loaded(saved(torch.arange(3.0)), map_location="vgpu:2")
    assert back.device.index == 2
    assert back.tolist() == [0, 1, 2]


@pytest.mark.parametrize("location", [None, "cpu"])
def test_views_of_one_storage_stay_views(location):
    base = torch.arange(6.0, device="vgpu:0")
    whole, part = loaded(saved([base, base.view(2, 3)[1]]), map_location=location)
    whole[3] = 99
    assert part.tolist() == [99, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.uint16])
def test_tensors_of_other_types_survive(dtype):
    x = torch.tensor([0, 1, 3]).to(dtype)
    back = loaded(saved(x.to("vgpu:1")))
    assert back.device.index == 1
    assert back.dtype == dtype
    assert torch.equal(back.cpu(), x)


def test_modules_parameters_and_requires_grad_survive():
    layer = nn.Linear(2, 2).to("vgpu:1")
    back = loaded(saved(layer), weights_only=False)
    assert isinstance(back.weight, nn.Parameter)
    assert back.weight.device.index == 1
    assert back.weight.requires_grad
    assert loaded(saved(torch.ones(1, device="vgpu:0", requires_grad=True))).requires_grad


def test_the_error_for_a_file_from_a_missing_gpu_says_how_many_there_are():
    data = saved(torch.ones(2, device="vgpu:2"))
    message = (
        r"Attempting to deserialize object on VGPU device 2 but torch\.vgpu\.device_count\(\) is 1"
    )
    with vgpu.enable(1), pytest.raises(RuntimeError, match=message):
        loaded(data)


def test_without_virtual_gpus_a_file_loads_only_onto_the_cpu():
    data = saved(torch.ones(2, device="vgpu:1"))
    vgpu.disable()
    try:
        with pytest.raises(RuntimeError, match=r"torch\.vgpu\.is_available\(\) is False"):
            loaded(data)
        assert loaded(data, map_location="cpu").tolist() == [1, 1]
    finally:
        vgpu.enable(3)


def test_a_process_without_vgpu_loads_the_file_onto_its_cpu(tmp_path):
    torch.save({"w": torch.arange(3.0, device="vgpu:1")}, tmp_path / "checkpoint.pt")
    program = (
        "import sys, torch\n"
        "try:\n    torch.load('checkpoint.pt')\n"
        "except RuntimeError as error:\n    print('tagged with vgpu:1' in str(error))\n"
        "print(torch.load('checkpoint.pt', map_location='cpu')['w'].tolist())\n"
        "assert not [name for name in sys.modules if name.startswith('vgpu')]\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.split("\n")[:2] == ["True", "[0.0, 1.0, 2.0]"]
