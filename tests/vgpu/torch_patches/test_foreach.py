"""Optimizers and clipping handle all tensors at once by default, as on CUDA."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.optimizer import _default_to_fused_or_foreach

import vgpu

OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD"),
    )
}
SEVERAL, ONE_BY_ONE = {"foreach": True}, {"foreach": False}


@pytest.fixture(autouse=True)
def two_gpus():
    with vgpu.enable(2):
        yield


def network(device="vgpu:0"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8), nn.PReLU()).to(device)


def give_gradients(model):
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, number + 0.5)


def seen(model, act):
    """Return the second call's kernels and bytes, and the parameters and gradients after it."""
    give_gradients(model)
    act()
    give_gradients(model)
    torch.vgpu.reset_peak_memory_stats()
    before = torch.vgpu.memory_allocated()
    with vgpu.record() as timeline:
        act()
    names = [(event.name, event.end_s - event.start_s) for event in timeline.events]
    temporary = torch.vgpu.max_memory_allocated() - before
    return names, temporary, [[p.detach(), p.grad] for p in model.parameters()]


def assert_same(one, other):
    assert one[:2] == other[:2]
    if not any(vgpu.is_shape(p) for pair in one[2] + other[2] for p in pair):
        torch.testing.assert_close(one[2], other[2], rtol=0, atol=0)


def of_optimizer(kind, **options):
    model = network()
    return seen(model, kind(model.parameters(), **options).step)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_handles_all_parameters_at_once_by_default(name):
    kind = OPTIMIZERS[name]
    found = of_optimizer(kind)
    assert_same(found, of_optimizer(kind, **SEVERAL))
    assert len(found[0]) < len(of_optimizer(kind, **ONE_BY_ONE)[0])
    if name != "ASGD":  # it reads the step count from the GPU
        with vgpu.shapes_only():
            assert_same(found, of_optimizer(kind))


def test_an_optimizer_that_loops_on_cuda_loops_here():
    """They are Adafactor, by its own default, differentiable steps, and the norm of a Parameter."""
    assert_same(
        of_optimizer(torch.optim.Adafactor), of_optimizer(torch.optim.Adafactor, **ONE_BY_ONE)
    )
    p, grad = torch.ones(4, device="vgpu"), torch.ones(4, device="vgpu")
    assert _default_to_fused_or_foreach([p], differentiable=True) == (False, False)
    with vgpu.record() as timeline:
        get_total_norm([nn.Parameter(p)])
        get_total_norm([grad])
    assert [e.name for e in timeline.events if "norm" in e.name] == [
        *("linalg_vector_norm", "linalg_vector_norm"),
        *("_foreach_norm", "linalg_vector_norm"),
    ]


@pytest.mark.parametrize("clip", [lambda ps, **how: clip_grad_norm_(ps, 1.0, **how),
                                  lambda ps, **how: clip_grad_value_(ps, 1.0, **how)])  # fmt: skip
@pytest.mark.parametrize("block", [torch.enable_grad, vgpu.shapes_only])
def test_clipping_handles_all_gradients_at_once_by_default(clip, block):
    with block():
        runs = []
        for how in ({}, SEVERAL, ONE_BY_ONE):
            model = network()
            runs.append(seen(model, lambda m=model, h=how: clip(m.parameters(), **h)))
    assert_same(*runs[:2])
    assert len(runs[0][0]) < len(runs[2][0])


def test_sparse_gradients_are_updated_too():
    """Momentum and clipping update them through operators on lists of tensors."""

    def trained(device):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 2], device=device)).square().sum().backward()
            try:
                norms.append(clip_grad_norm_(model.parameters(), 0.5).cpu())
            except (
                NotImplementedError
            ):  # torch 2.13 has no norm of sparse gradients, even on the CPU
                norms.append(torch.tensor(-1.0))
            optimizer.step()
        return model.weight.detach().cpu(), norms, model.weight.grad.cpu()

    torch.testing.assert_close(trained("vgpu"), trained("cpu"))


def test_an_optimizer_handles_parameters_on_gpus_and_on_the_host():
    moved, made, host = network(), nn.Linear(2, 2, device="vgpu:1"), network("cpu")
    for model in (moved, made, copy.deepcopy(moved)):
        assert _default_to_fused_or_foreach(list(model.parameters()), False) == (False, True)
        assert _default_to_fused_or_foreach(list(model.parameters()), False, True) == (True, False)
    assert _default_to_fused_or_foreach(list(host.parameters()), False) == (False, False)
    with vgpu.shapes_only():
        shapes = [*nn.Linear(2, 2).parameters()]
    assert _default_to_fused_or_foreach(shapes, False) == (False, False)


def test_optimizers_handle_all_parameters_at_once_under_ddp_and_fsdp2():
    kernels = {}
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        for how in ({}, SEVERAL):
            with vgpu.cluster(1, gpus_per_host=2), vgpu.shapes_only():
                model = wrap(network("vgpu"))
                optimizer = torch.optim.AdamW(model.parameters(), **how)
                model(torch.empty(2, 64, device="vgpu")).sum().backward()
                with vgpu.record() as timeline:
                    clip_grad_norm_(model.parameters(), 1.0, **how)
                    optimizer.step()
            kernels[wrap, len(how)] = [event.name for event in timeline.events]
        assert kernels[wrap, 0] == kernels[wrap, 1]
        assert "_foreach_norm" in kernels[wrap, 0] and "_foreach_addcdiv_" in kernels[wrap, 0]
