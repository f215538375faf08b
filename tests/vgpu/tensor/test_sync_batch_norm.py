"""nn.SyncBatchNorm over ranks with virtual GPUs is batch norm on the whole batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import vgpu
from vgpu import launch


def on_a_rank(rank, world_size, module, parts):
    torch.manual_seed(rank)
    # Without virtual GPUs of its own the rank has a group of gloo alone, where torch gathers
    # in another way.
    with nullcontext() if vgpu.is_enabled() else vgpu.enable(world_size):
        gpu = torch.device("vgpu", rank)
        synced = nn.SyncBatchNorm.convert_sync_batchnorm(module).to(gpu)
        x = parts[rank].to(gpu).requires_grad_()
        y = synced(x)
        (y**3).sum().backward()
        gradients = [p.grad.cpu() for p in synced.parameters()]
        return y.detach().cpu(), x.grad.cpu(), gradients, synced.cpu().state_dict()


@pytest.mark.parametrize("gpu", [None, "V100"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5, 4)])
def test_unequal_parts_give_what_the_whole_batch_gives(shape, affine, gpu):
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    module = kind(3, affine=affine)
    if affine:
        nn.init.uniform_(module.weight, 0.5, 2)
        nn.init.uniform_(module.bias)
    x = 2 * torch.randn(shape) + 1
    ranks = launch.run(on_a_rank, 2, copy.deepcopy(module), x.split([3, 5]), gpu=gpu)
    whole = x.clone().requires_grad_()
    y = module(whole)
    (y**3).sum().backward()
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), y.detach())
    torch.testing.assert_close(
        torch.cat([rank[1] for rank in ranks]), whole.grad, rtol=1e-4, atol=1e-4
    )
    for index, parameter in enumerate(module.parameters()):
        # Each rank has the gradient of its own part; adding them up is left to DDP.
        summed = sum(rank[2][index] for rank in ranks)
        torch.testing.assert_close(summed, parameter.grad, rtol=1e-4, atol=1e-4)
    for _, _, _, state in ranks:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(state[name], value)


def test_the_cpu_has_them_only_while_there_are_virtual_gpus():
    vgpu.disable()  # what a test before this one may have left enabled
    x = torch.randn(4, 3)
    with vgpu.enable(1):
        torch.batch_norm_stats(x, 1e-5)
    with pytest.raises(NotImplementedError):
        torch.batch_norm_stats(x, 1e-5)
