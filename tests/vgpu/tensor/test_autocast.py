"""Autocast: torch's own lists of operators, CUDA's bytes, and the cache of cast weights."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vgpu.tensor import autocast as lists

pytestmark = pytest.mark.virtual_gpus(1)

MIB = 2**20
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def listed_in_the_header(macro):
    """Return the operators in ``AT_FORALL_<macro>``, each as "name" or "name.overload"."""
    (text,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", text)
    return {name + (overload and f".{overload}") for name, overload in found}


@pytest.mark.parametrize(
    ("macro", "mine"),
    [
        ("LOWER_PRECISION_FP", lists.LOWER_PRECISION_FP),
        ("FP32", lists.FP32),
        ("FP32_SET_OPT_DTYPE", lists.FP32_SET_OPT_DTYPE),
        ("PROMOTE", lists.PROMOTE),
    ],
)
def test_the_lists_match_the_installed_torch(macro, mine):
    assert len(mine) == len(set(mine))
    assert set(mine) == listed_in_the_header(macro)


def images():
    return torch.randn(1, 3, 8, 8, device="vgpu:0").bfloat16()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nn.RMSNorm(8).to("vgpu:0")(x),
        lambda x: F.rms_norm(x, (8,)),
        lambda x: torch.rms_norm(x, (8,)),
        lambda x: F.interpolate(x[0], scale_factor=2, mode="nearest-exact"),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
        lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest-exact"),
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True),
        lambda x: torch.frobenius_norm(x, (2, 3)),
        lambda x: x.norm(3),
    ],
)
@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated")
def test_operators_on_the_float32_list_run_in_float32(call):
    x = images()
    with torch.autocast("vgpu", torch.bfloat16):
        found = call(x)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, call(x.float()))


def peak_and_kept(call):
    torch.vgpu.reset_peak_memory_stats()
    before = torch.vgpu.memory_allocated()
    result = call()
    kept = torch.vgpu.memory_allocated() - before
    peak = torch.vgpu.max_memory_allocated() - before
    del result
    return peak, kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("call", "peak_mib", "kept_mib"),
    [
        (lambda x: x.sum(), 0, 0),
        (lambda x: x.sum(0), 0, 0),
        (lambda x: x.prod(), 0, 0),
        (lambda x: x.prod(0), 0, 0),
        (lambda x: torch.linalg.vector_norm(x), 0, 0),
        (lambda x: torch.linalg.matrix_norm(x), 0, 0),
        (lambda x: x.cumsum(0), 8, 4),
    ],
)
def test_reductions_read_half_precision_and_sum_in_float32(dtype, call, peak_mib, kept_mib):
    """make_reduction in ATen/native/ReduceOpsUtils.h casts half precision on the CPU only;
    impl_func_cum_ops in ReduceOps.cpp casts everywhere."""
    # Shuffled, so that no thread's partial product is 0 or infinity, whatever the number of
    # threads.
    order = torch.randperm(2**20, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(0.98, 1.02, 2**20)[order].view(1024, 1024).to("vgpu:0", dtype)
    x.requires_grad_()
    with torch.autocast("vgpu", dtype):
        peak, kept = peak_and_kept(lambda: call(x))
        found = call(x)
    assert (peak // MIB, kept // MIB) == (peak_mib, kept_mib)
    wide = x.detach().float().requires_grad_()
    expected = call(wide)
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.to(dtype))


def test_requested_dtypes_and_float64_are_kept():
    x = images()
    with torch.autocast("vgpu", torch.bfloat16):
        assert x.sum(dtype=torch.bfloat16).dtype is torch.bfloat16
        assert x.softmax(0, dtype=torch.float64).dtype is torch.float64
        assert x.double().sum().dtype is torch.float64
        assert x.double().cumsum(0).dtype is torch.float64
        assert torch.ones(2, dtype=torch.int32, device="vgpu:0").sum().dtype is torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_run_in_float16_as_cudnns_do(kind, dtype):
    torch.manual_seed(0)
    model, x = kind(5, 6, bidirectional=True).to("vgpu"), torch.randn(3, 4, 5, device="vgpu")
    hidden = torch.randn(2, 4, 6, device="vgpu")
    hidden = (hidden, hidden + 1) if kind is nn.LSTM else hidden
    sequence = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 3, 2, 1]))
    for given in (x, sequence):
        with torch.autocast("vgpu", dtype):
            found, states = model(given, hidden)
        packed = given is sequence
        values, states = found.data if packed else found, torch.as_tensor(states[0])
        assert values.dtype is states.dtype is torch.float16
        expected = model(given, hidden)[0]
        expected = expected.data if packed else expected
        torch.testing.assert_close(values.float(), expected, rtol=1e-2, atol=1e-2)
        values.float().sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    with torch.backends.cudnn.flags(enabled=False), torch.autocast("vgpu", dtype):
        assert nn.RNN(5, 6).to("vgpu")(x)[0].dtype is dtype


# The cast cache


def test_a_cast_weight_is_kept_until_the_outermost_block_ends():
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(10))).to("vgpu:0")
    x = torch.randn(4, 1024, device="vgpu:0")
    start = torch.vgpu.memory_allocated()
    with torch.autocast("vgpu", torch.bfloat16), torch.no_grad():
        with torch.autocast("vgpu", torch.bfloat16):
            layers(x)
        assert (torch.vgpu.memory_allocated() - start) // MIB == 20
        torch.clear_autocast_cache()
        assert torch.vgpu.memory_allocated() == start
        layers(x)
    assert torch.vgpu.memory_allocated() == start
    with torch.autocast("vgpu", torch.bfloat16, cache_enabled=False), torch.no_grad():
        layers(x)
        assert torch.vgpu.memory_allocated() == start


def test_a_weight_used_eight_times_is_cast_once():
    layer = nn.Linear(1024, 1024, bias=False).to("vgpu:0")
    x = torch.randn(4, 1024, device="vgpu:0")

    def used(times):
        hidden = x
        for _ in range(times):
            hidden = layer(hidden)
        return hidden

    with torch.autocast("vgpu", torch.bfloat16):
        _, kept = peak_and_kept(lambda: used(8))
        assert kept // MIB == 2
        used(8).float().sum().backward()
    found = layer.weight.grad.cpu()
    plain = nn.Linear(1024, 1024, bias=False)
    plain.weight = nn.Parameter(layer.weight.detach().cpu())
    layer, x = plain, x.cpu()
    with torch.autocast("cpu", torch.bfloat16):
        used(8).float().sum().backward()
    torch.testing.assert_close(found, plain.weight.grad)


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("aten::_to_copy", "aten::to.dtype")
        return func(*args, **(kwargs or {}))


def casts_and_histories(device, make_weight, modes, **options):
    """Return (casts, whether the result has a history) for each use of one weight in ``modes``."""
    weight = make_weight(torch.ones(4, 2, device=device))
    x = torch.ones(2, weight.shape[0], dtype=torch.bfloat16, device=device)
    found = []
    with Casts() as casts, torch.autocast(device, torch.bfloat16, **options):
        for mode in modes:
            before = casts.count
            with mode():
                history = torch.mm(x, weight).requires_grad
            found.append((casts.count - before, history))
    return found


GRAD, NO_GRAD, INFERENCE = torch.enable_grad, torch.no_grad, torch.inference_mode


@pytest.mark.parametrize(
    "modes",
    [
        (GRAD, GRAD),
        (NO_GRAD, NO_GRAD),
        (NO_GRAD, GRAD, NO_GRAD, GRAD),
        (GRAD, NO_GRAD, GRAD),
        (INFERENCE, NO_GRAD, GRAD, INFERENCE, NO_GRAD),
    ],
    ids=lambda modes: " ".join(mode.__name__ for mode in modes),
)
def test_the_cache_behaves_like_torchs_own_on_the_cpu(modes):
    expected = casts_and_histories("cpu", nn.Parameter, modes)
    assert casts_and_histories("vgpu", nn.Parameter, modes) == expected


@pytest.mark.parametrize(
    "make_weight",
    [
        lambda values: values[:2].requires_grad_(),  # a leaf, but a view
        lambda values: nn.Parameter(values).t().t(),
        lambda values: nn.Parameter(values, requires_grad=False),
    ],
    ids=["view", "view of a parameter", "frozen"],
)
def test_casts_of_views_and_frozen_weights_are_not_cached(make_weight):
    expected = casts_and_histories("cpu", make_weight, (GRAD, GRAD))
    assert casts_and_histories("vgpu", make_weight, (GRAD, GRAD)) == expected
