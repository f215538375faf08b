"""Norms as on CUDA: half-precision statistics in float32, RMSNorm in one kernel, SyncBatchNorm."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgpu
from vgpu import launch

pytestmark = pytest.mark.virtual_gpus(2, gpu="A100")

aten = torch.ops.aten
HALF = [torch.float16, torch.bfloat16]


def layer_norm(x, weight, *running):
    return aten.native_layer_norm(x, [6], weight, weight, 1e-5)


def in_training(x, weight, *running):
    return aten.native_batch_norm(x, weight, weight, *running, True, 0.1, 1e-5)


def in_evaluation(x, weight, *running):
    return aten.native_batch_norm(x, weight, weight, *running, False, 0.1, 1e-5)


@pytest.mark.parametrize("block", [nullcontext, vgpu.shapes_only], ids=["values", "shapes"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("norm", [layer_norm, in_training, in_evaluation])
def test_statistics_are_float32_and_the_output_has_the_inputs_dtype(norm, dtype, block):
    """_refs.native_layer_norm and _decomp's native_batch_norm do so for all devices but the CPU."""
    with block():
        x = torch.randn(4, 6, device="vgpu:0", dtype=dtype)
        weight, mean, var = (torch.ones(6, device="vgpu:0", dtype=dtype) for _ in range(3))
        output, *statistics = norm(x, weight, mean, var)
    rows = (4, 1) if norm is layer_norm else (6,)
    assert output.dtype is dtype
    assert [(one.dtype, one.shape) for one in statistics] == [(torch.float32, rows)] * 2


@pytest.mark.parametrize("block", [nullcontext, vgpu.shapes_only], ids=["values", "shapes"])
@pytest.mark.parametrize("dtype", HALF)
def test_batch_norm_of_mixed_dtypes_fails_in_backward_as_on_cuda(dtype, block):
    """``batch_norm_backward_cuda`` with weights in the input's dtype and statistics in another."""
    with block():
        norm = nn.BatchNorm2d(6, device="vgpu:0")
        x = torch.randn(4, 6, 3, 3, device="vgpu:0", dtype=dtype, requires_grad=True)
        norm(x).sum().backward()  # parameters and statistics in float32
        for parameter in norm.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None
        output = norm(x)
        with pytest.raises(RuntimeError, match=r"Expected running_mean to have type \w+ but got"):
            output.sum().backward()
        norm(x.to(memory_format=torch.channels_last)).sum().backward()  # another kernel
        norm.to(dtype)(x).sum().backward()  # all in one dtype


def test_group_norm_keeps_the_inputs_dtype():
    """As on CUDA: param_scalar_type in ATen/native/group_norm.cpp is shared with the CPU."""
    x = torch.randn(2, 6, 4, device="vgpu:0", dtype=torch.float16)
    _, mean, rstd = aten.native_group_norm(x, None, None, 2, 6, 4, 3, 1e-5)
    assert mean.dtype is rstd.dtype is torch.float16


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(64),
        nn.BatchNorm1d(64),
        nn.BatchNorm1d(64).eval(),
        nn.BatchNorm1d(64, affine=False, track_running_stats=False),
    ],
    ids=["layer", "batch", "evaluated", "neither weight nor running statistics"],
)
def test_values_and_gradients_match_float32_rounded_once(module, dtype):
    torch.manual_seed(0)
    x, grad = (torch.randn(32, 64) + 4).to(dtype), torch.randn(32, 64).to(dtype)

    def found(device, dtype):
        mine = copy.deepcopy(module).to(device, dtype)
        inputs = x.to(device, dtype).requires_grad_()
        output = mine(inputs)
        output.backward(grad.to(device, dtype))
        state = [*mine.buffers(), *(p.grad for p in mine.parameters())]
        return [tensor.cpu() for tensor in (output.detach(), inputs.grad, *state)]

    for mine, exact in zip(found("vgpu:0", dtype), found("cpu", torch.float32), strict=True):
        assert mine.dtype is (exact.to(dtype).dtype if exact.is_floating_point() else exact.dtype)
        assert torch.equal(mine, exact.to(mine.dtype))


@pytest.mark.parametrize("block", [nullcontext, vgpu.shapes_only], ids=["values", "shapes"])
def test_a_layer_norm_weight_of_another_dtype_is_rejected(block):
    with block():
        x = torch.randn(3, 4, device="vgpu:0", dtype=torch.float16)
        weight = torch.ones(4, device="vgpu:0")
        with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
            F.layer_norm(x, (4,), weight)
        assert F.layer_norm(x[:0], (4,), weight).shape == (0, 4)


def test_sync_batch_norm_statistics_are_float32():
    """torch.nn.modules._functions sends them to the other ranks unchanged."""
    x = torch.full((70000, 1), 3.0, device="vgpu:0", dtype=torch.float16)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    assert mean.dtype is invstd.dtype is torch.float32 and mean.item() == 3
    running = torch.zeros(1, device="vgpu:0", dtype=torch.float16)
    counts = torch.full((1,), 70000.0, device="vgpu:0")  # float16's maximum is 65504
    whole, _ = torch.batch_norm_gather_stats_with_counts(
        x, mean[None], invstd[None], running, running.clone(), 0.5, 1e-5, counts
    )
    assert whole.item() == 3 and running.item() == 1.5
    weight = torch.ones_like(running)
    assert torch.batch_norm_elemt(x, weight, weight, mean, invstd, 1e-5).dtype is torch.float16
    sums = torch.batch_norm_backward_reduce(x, x, mean, invstd, weight, True, True, True)
    assert [one.dtype for one in sums] == [torch.float32] * 2 + [torch.float16] * 2


# RMSNorm

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def normalized(device, dtype, shape, normalized_shape, weighted=True):
    """Return the output and the gradients of the input and the weight, on the CPU."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(normalized_shape, elementwise_affine=weighted).to(dtype)
    x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    if weighted:
        nn.init.uniform_(norm.weight)
    norm, x = norm.to(device), x.to(device).requires_grad_()
    output = norm(x)
    output.backward(grad.to(device))
    return [each.cpu() for each in (output.detach(), x.grad, *(p.grad for p in norm.parameters()))]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("shape", "normalized_shape"),
    [((4, 6, 16), (16,)), ((3, 4, 8), (4, 8)), ((16,), (16,)), ((0, 16), (16,))],
)
def test_rms_norm_has_the_cpus_values_and_gradients(dtype, weighted, shape, normalized_shape):
    given = dtype, shape, normalized_shape, weighted
    on_gpu, expected = (normalized(device, *given) for device in ("vgpu:1", "cpu"))
    assert torch.equal(on_gpu[0], expected[0])
    torch.testing.assert_close(on_gpu[1:], expected[1:])


def step(norm, rows):
    """Return a step's kernel names, the bytes that forward keeps, and backward's peak bytes."""
    x = torch.randn(rows, 1024, device="vgpu:1", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones_like(x)
    before = torch.vgpu.memory_allocated(1)
    with vgpu.record() as timeline:
        y = norm(x)
        kept = torch.vgpu.memory_allocated(1) - before
        torch.vgpu.reset_peak_memory_stats(1)
        y.backward(grad)
    return [e.name for e in timeline.events], kept, torch.vgpu.max_memory_allocated(1) - before


@pytest.mark.parametrize("values", [nullcontext, vgpu.shapes_only])
def test_rms_norm_runs_one_kernel_per_pass_and_keeps_one_value_per_row(values):
    rows = 1024
    with values():
        norm = nn.RMSNorm(1024).to("vgpu:1", torch.bfloat16)
        kernels, kept, peak = step(norm, rows)
    assert kernels == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    assert kept == rows * 1024 * 2 + rows * 4
    assert peak == kept + rows * 1024 * 2 + 1024 * 2  # the gradients of the input and the weight


def test_rms_norm_without_autograd_is_one_kernel():
    norm = nn.RMSNorm(64).to("vgpu:1")
    x = torch.randn(8, 64, device="vgpu:1")
    for without in (torch.no_grad, torch.inference_mode):
        with without(), vgpu.record() as timeline:
            norm(x)
        assert [e.name for e in timeline.events] == ["_fused_rms_norm"]


# SyncBatchNorm across ranks matches batch norm on the full batch


def on_a_rank(rank, world_size, module, parts):
    torch.manual_seed(rank)
    # Without virtual GPUs, the rank has only a gloo group, with which torch gathers differently.
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
def test_sync_batch_norm_on_unequal_parts_matches_the_full_batch(shape, affine, gpu):
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
        # Each rank has its own part's gradient; reducing them is left to DDP.
        summed = sum(rank[2][index] for rank in ranks)
        torch.testing.assert_close(summed, parameter.grad, rtol=1e-4, atol=1e-4)
    for _, _, _, state in ranks:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(state[name], value)


def test_the_cpu_has_these_kernels_only_while_virtual_gpus_are_enabled():
    vgpu.disable()  # a previous test may have left them enabled
    x = torch.randn(4, 3)
    with vgpu.enable(1):
        torch.batch_norm_stats(x, 1e-5)
    with pytest.raises(NotImplementedError):
        torch.batch_norm_stats(x, 1e-5)
