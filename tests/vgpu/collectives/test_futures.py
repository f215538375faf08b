"""What an asynchronous collective promises, and the communication hooks of DDP that use it."""

import pytest
import torch
from cells import cell

from vgpu import launch

FUTURES = """
def main(rank, world):
    x = torch.full((3,), rank + 1.0, device="vgpu")
    y = torch.empty(world * 3, device="vgpu")
    parts = [torch.empty(3, device="vgpu") for _ in range(world)]
    cpu = torch.ones(3)
    held = torch.vgpu.memory_allocated()
    (reduced,) = dist.all_reduce(x, async_op=True).get_future().wait()
    gathered = dist.all_gather_single(y, x, async_op=True).get_future().wait()
    work = dist.all_gather(parts, x, async_op=True)
    listed = work.get_future().wait()
    work.wait()  # its future is done a moment before it is
    (plain,) = dist.all_reduce(cpu, async_op=True).get_future().wait()
    everything = torch.utils._pytree.tree_leaves((reduced, gathered, listed, work.result()))
    assert all(tensor.device == x.device for tensor in everything), everything
    assert torch.vgpu.memory_allocated() == held, "the same memory"
    reduced.add_(1)
    assert x.tolist() == [world * (world + 1) / 2 + 1] * 3
    assert type(plain) is torch.Tensor and plain.device.type == "cpu"
    twice = dist.all_reduce(x[:2], async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    return str(twice.wait().device), twice.wait().tolist()
"""


def test_a_future_holds_tensors_of_the_gpu_that_took_part():
    found = launch.run(cell(FUTURES)["main"], 2, gpu="V100")
    assert found == [(f"vgpu:{rank}", [16.0, 16.0]) for rank in range(2)]


HOOKS = """
def main(rank, world, name):
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks, powerSGD_hook, quantization_hooks,
    )

    def own(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(world).clone())

    hooks = {
        "own": (None, own),
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "PowerSGD": (
            powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook,
        ),
    }
    found = []
    for kind in ("cpu", "vgpu"):
        torch.manual_seed(rank)
        blocks = [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)]
        model = DDP(torch.nn.Sequential(*blocks).to(kind))
        state, hook = hooks[name]
        if state is not None:
            state = type(state)(None, 2, start_powerSGD_iter=2)
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 16).to(kind)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            values += [loss.item(), *(p.grad.cpu() for p in model.parameters())]
            optimizer.step()
        found.append(values)
    return found
"""


# torch asks for CUDA's build of it, whatever the device.
CUDA_BUILD = pytest.mark.skipif(
    torch.version.cuda is None, reason="this build of torch lacks the bf16 hook"
)


@pytest.mark.parametrize(
    "name", ["own", "allreduce", "fp16", pytest.param("bf16", marks=CUDA_BUILD), "PowerSGD"]
)
def test_a_communication_hook_gives_what_it_gives_on_the_cpu(name):
    for on_cpu, on_gpu in launch.run(cell(HOOKS)["main"], 2, name, gpu="V100"):
        assert len(on_gpu) == 25
        for one, other in zip(on_gpu, on_cpu, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
