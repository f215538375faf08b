"""Lazy modules on virtual GPUs: as on the CPU, and as CUDA has it where they meet DataParallel."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

import vgpu

pytestmark = [
    pytest.mark.virtual_gpus(2),
    pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning"),
]

GPU = "vgpu:1"


def network():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(4, 1))


def moved(model):
    return model.to(GPU)


def by_name(model):
    return model.vgpu(1)


def by_way_of_another(model):
    return model.to("vgpu:0").to(GPU)


@pytest.mark.parametrize("move", [moved, by_name, by_way_of_another])
def test_the_first_batch_gives_it_the_size_and_values_that_it_gets_on_the_cpu(move):
    torch.manual_seed(0)
    reference = network()
    torch.manual_seed(0)
    model = move(network())
    assert all(p.device == torch.device(GPU) for p in (*model.parameters(), *model.buffers()))
    assert isinstance(model[0].weight, UninitializedParameter)
    assert isinstance(model[1].running_mean, UninitializedBuffer)
    assert repr(model[0].weight) == "<UninitializedParameter>"
    batch = torch.randn(5, 3)
    for one, x in ((reference, batch), (model, batch.to(GPU))):
        torch.manual_seed(1)
        one(x).sum().backward()
    assert not any(is_lazy(p) for p in (*model.parameters(), *model.buffers()))
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.device == torch.device(GPU)
        assert isinstance(mine, nn.Parameter)
        torch.testing.assert_close(mine.detach().cpu(), other.detach())
        torch.testing.assert_close(mine.grad.cpu(), other.grad)
    for mine, other in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), other)


def test_it_is_made_there_and_takes_bytes_once_it_has_a_size():
    before = torch.vgpu.memory_allocated(GPU)
    with torch.device(GPU):
        model = nn.LazyLinear(4)
    assert model.weight.device == nn.LazyLinear(4, device=GPU).bias.device == torch.device(GPU)
    assert torch.vgpu.memory_allocated(GPU) == before
    model(torch.ones(2, 3, device=GPU))
    assert model.weight.shape == (4, 3)
    assert torch.vgpu.memory_allocated(GPU) == before + 2 * 512


def test_it_comes_back_and_changes_its_type():
    model = nn.LazyLinear(4).to(GPU).double()
    assert model.weight.dtype is torch.float64
    assert model.weight.device == torch.device(GPU)
    model.cpu()
    assert type(model.weight) is UninitializedParameter
    assert model(torch.ones(2, 3, dtype=torch.float64)).device.type == "cpu"


def test_copies_and_pickles_are_torch_s_own():
    weight = nn.LazyLinear(4).to(GPU).weight
    assert copy.deepcopy(weight).device == torch.device(GPU)
    assert type(pickle.loads(pickle.dumps(weight))) is UninitializedParameter


def test_it_takes_a_state_that_has_a_size():
    values = nn.Linear(3, 4).state_dict()
    model = nn.LazyLinear(4).to(GPU)
    model.load_state_dict(values)
    torch.testing.assert_close(model.weight.detach().cpu(), values["weight"])


def test_data_parallel_on_several_gpus_needs_a_batch_first_as_on_cuda():
    model = nn.DataParallel(nn.LazyLinear(4).to("vgpu:0"))
    batch = torch.ones(4, 3, device="vgpu:0")
    # Of torch's own test_data_parallel_lazy_linear.
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        model(batch)
    refusal = "Modules with uninitialized parameters can't be used with `DataParallel`"
    with torch.no_grad(), pytest.raises(RuntimeError, match=refusal):
        model(batch)
    model.module(batch)  # "Run a dummy forward pass", says the error
    assert model(batch).shape == (4, 4)


def test_data_parallel_on_one_gpu_gives_it_its_size():
    model = nn.DataParallel(nn.LazyLinear(4).to(GPU), device_ids=[1])
    assert model(torch.ones(4, 3, device=GPU)).device == torch.device(GPU)


def test_in_shapes_only():
    with vgpu.shapes_only():
        model = nn.LazyLinear(4, device=GPU)
        assert model(torch.ones(2, 3, device=GPU)).shape == (2, 4)
    assert vgpu.is_shape(model.weight)
