"""PyTorch's own DataParallel on virtual GPUs: replicas' shapes, and a single device's gradients."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

import vgpu

# Claims B02-B05: batches of 30, 30, 30 and 10, and each replica's share.
LISTINGS = {
    1: [[30], [30], [30], [10]],
    2: [[15, 15]] * 3 + [[5, 5]],
    3: [[10, 10, 10]] * 3 + [[4, 4, 2]],
    8: [[4] * 7 + [2]] * 3 + [[2] * 5],
}


class Recording(nn.Module):
    """A linear layer that records the batch size and device of each call."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 2)
        self.calls = []

    def forward(self, x):
        self.calls.append((x.device.index, x.size(0)))
        assert self.fc.weight.device == x.device
        return self.fc(x)


@pytest.mark.parametrize("count", LISTINGS)
def test_replicas_see_their_share_and_gradients_equal_one_device(count):
    torch.manual_seed(0)
    with vgpu.enable(count):
        model = Recording()
        reference = copy.deepcopy(model.fc)
        parallel = nn.DataParallel(model).to("vgpu:0")
        for listing in LISTINGS[count]:
            model.calls.clear()
            x = torch.randn(sum(listing), 5)
            out = parallel(x.to("vgpu:0"))
            assert sorted(model.calls) == list(enumerate(listing))
            assert out.device == torch.device("vgpu:0")
            torch.testing.assert_close(out.cpu(), reference(x))
            out.square().mean().backward()
            reference(x).square().mean().backward()
            for mine, other in zip(model.fc.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.cpu(), other.grad)


def test_four_primitives_make_up_data_parallel():
    with vgpu.enable(4):
        model = nn.Linear(3, 2).to("vgpu:0")
        x = torch.randn(10, 3, device="vgpu:0")
        inputs = scatter(x, range(4))
        assert [part.device.index for part in inputs] == [0, 1, 2, 3]
        replicas = replicate(model, range(4))
        names = [f"vgpu:{index}" for index in range(4)]
        for devices in (range(4), names, [torch.device(name) for name in names], None):
            outputs = parallel_apply(replicas, inputs, devices=devices)
            assert [part.device.index for part in outputs] == [0, 1, 2, 3]
        result = gather(outputs, 0)
        torch.testing.assert_close(result.cpu(), model(x).cpu())
        result.sum().backward()
        expected = torch.autograd.grad(model(x).sum(), model.weight)[0]
        torch.testing.assert_close(model.weight.grad.cpu(), expected.cpu())


def test_the_error_for_a_module_on_another_gpu_names_both_gpus():
    with vgpu.enable(2):
        parallel = nn.DataParallel(nn.Linear(3, 2).to("vgpu:1"))
        message = r"on device vgpu:0 \(device_ids\[0\]\) but found one of them on device: vgpu:1"
        with pytest.raises(RuntimeError, match=message):
            parallel(torch.randn(4, 3))


def test_batch_norm_buffers_of_the_first_replica_are_kept():
    with vgpu.enable(2):
        torch.manual_seed(0)
        parallel = nn.DataParallel(nn.BatchNorm1d(3).to("vgpu:0"))
        x = torch.randn(8, 3)
        parallel(x.to("vgpu:0"))
        reference = nn.BatchNorm1d(3)
        reference(x[:4])
        torch.testing.assert_close(parallel.module.running_mean.cpu(), reference.running_mean)


def test_repeated_steps_of_eight_replicas_leak_no_bytes_or_threads():
    gc.collect()  # garbage from earlier tests
    with vgpu.enable(8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        parallel = nn.DataParallel(model.to("vgpu:0"))
        x = torch.randn(32, 4)
        gradients = []
        allocated = []
        for _ in range(25):
            parallel.zero_grad()
            parallel(x).sum().backward()
            gradients.append([p.grad.cpu() for p in model.parameters()])
            allocated.append([torch.vgpu.memory_allocated(i) for i in range(8)])
        for step in gradients[1:]:
            for mine, first in zip(step, gradients[0], strict=True):
                torch.testing.assert_close(mine, first, rtol=1e-5, atol=1e-5)
        assert allocated[1:] == [allocated[1]] * 24
        assert allocated[1][1:] == [0] * 7
        assert not [t for t in threading.enumerate() if "_worker" in t.name]


def test_an_error_in_a_replica_names_it_and_the_device_stays_usable():
    class Fails(nn.Module):
        def forward(self, x):
            if x.device.index == 1:
                raise ValueError("second replica only")
            return x

    with vgpu.enable(2):
        x = torch.ones(4, 1, device="vgpu:0")
        with pytest.raises(ValueError, match="Caught ValueError in replica 1 on device 1"):
            nn.DataParallel(Fails())(x)
        assert nn.DataParallel(nn.Identity())(x).sum().item() == 4


def test_gather_copies_into_place_and_rejects_mismatched_shapes():
    with vgpu.enable(3):
        parts = [torch.full((2, 256), float(i), device=f"vgpu:{i}") for i in range(3)]
        torch.vgpu.reset_peak_memory_stats(0)
        before = torch.vgpu.memory_allocated(0)
        whole = gather(parts, 0)
        assert torch.vgpu.max_memory_allocated(0) - before == 6 * 256 * 4
        torch.testing.assert_close(whole.cpu(), torch.cat([part.cpu() for part in parts]))
        wrong = [torch.ones(2, 3, device="vgpu:0"), torch.ones(2, 4, device="vgpu:1")]
        message = r"Input tensor at index 1 has invalid shape \[2, 4\], but expected \[2, 3\]"
        with pytest.raises(RuntimeError, match=message):
            gather(wrong, 0)


@pytest.mark.parametrize("other", [torch.backends.mps, torch.cuda])
def test_virtual_gpus_come_first_if_another_accelerator_is_present(monkeypatch, other):
    monkeypatch.setattr(other, "is_available", lambda: True)
    with vgpu.enable(2):
        parallel = nn.DataParallel(Recording().to("vgpu:0"))
        assert parallel(torch.ones(4, 5)).device == torch.device("vgpu:0")
        assert sorted(parallel.module.calls) == [(0, 2), (1, 2)]


@pytest.mark.virtual_gpus(2)
def test_sparse_gradients_are_reduced():
    torch.manual_seed(0)
    plain = nn.Embedding(10, 3, sparse=True)
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu:0"), device_ids=[0, 1])
    batch = torch.tensor([[1, 2], [3, 1], [4, 4], [1, 0]])
    plain(batch).square().sum().backward()
    parallel(batch.to("vgpu:0")).square().sum().backward()
    found = parallel.module.weight.grad
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense().cpu(), plain.weight.grad.to_dense())


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 1j, 2, 3j]))
        self.register_buffer("shift", torch.tensor([1j, 0, 1]))

    def forward(self, x):
        return x * self.weight + self.shift


@pytest.mark.virtual_gpus(2)
def test_data_parallel_accepts_complex_inputs_parameters_and_outputs():
    inputs = torch.arange(12.0).reshape(4, 3) * (1 + 0.5j)
    plain = Complex()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu:0"), device_ids=[0, 1])
    found = []
    for model, device in ((plain, "cpu"), (parallel, "vgpu:0")):
        x = inputs.clone().to(device).requires_grad_()
        y = model(x)
        (y * y.conj()).real.sum().backward()
        found.append([y.detach().cpu(), x.grad.cpu()])
    found[0].append(plain.weight.grad)
    found[1].append(parallel.module.weight.grad.cpu())
    torch.testing.assert_close(found[1], found[0])
