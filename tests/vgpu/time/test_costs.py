"""Seconds from datasheets: the roofline, links, collectives, and fitting."""

import dataclasses
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import vgpu
from vgpu.collectives.table import COLLECTIVES
from vgpu.time.costs import expected_largest
from vgpu.time.workloads import Workload, work_of

ATEN = torch.ops.aten


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory_time():
    spec = vgpu.PRESETS["V100"]
    costs = vgpu.CostModel(spec, arithmetic_share=0.5, memory_share=0.8, kernel_s=0.0)
    flop = 10**12
    assert costs.kernel_time_s(Workload(flop, 1, "float32")) == flop / (15.7e12 * 0.5)
    assert costs.kernel_time_s(Workload(flop, 1, "float16")) == flop / (125e12 * 0.5)
    assert costs.kernel_time_s(Workload(1, 9 * 10**9, "float16")) == pytest.approx(0.01 / 0.8)


def test_each_assumed_share_applies_to_its_own_peak():
    link = vgpu.Link("test", 1e9, 0.0, "made for this test")
    whole = vgpu.CostModel(
        vgpu.PRESETS["K80"], link, arithmetic_share=1, memory_share=1, link_share=1, kernel_s=0
    )

    def times_s(**shares):
        costs = dataclasses.replace(whole, **shares)
        product, read = Workload(4370, 0), Workload(0, 240)
        return costs.kernel_time_s(product), costs.kernel_time_s(read), costs.copy_time_s(1)

    assert times_s() == pytest.approx((1e-9, 1e-9, 1e-9))
    assert times_s(arithmetic_share=0.5) == pytest.approx((2e-9, 1e-9, 1e-9))
    assert times_s(memory_share=0.5) == pytest.approx((1e-9, 2e-9, 1e-9))
    assert times_s(link_share=0.5) == pytest.approx((1e-9, 1e-9, 2e-9))


def test_an_in_place_matmul_costs_as_much_as_an_out_of_place_one():
    a, b, c = (torch.empty(2, *size, device="meta") for size in ((3, 4), (4, 5), (3, 5)))
    for plain, in_place, args in (
        (ATEN.addmm, ATEN.addmm_, (c[0], a[0], b[0])),
        (ATEN.baddbmm, ATEN.baddbmm_, (c, a, b)),
    ):
        expected = work_of(plain.default, args, {}, args[0])
        assert expected.flop == 2 * c[0].numel() * 4 * math.prod(args[0].shape[:-2])
        assert work_of(in_place.default, args, {}, args[0]) == expected


def test_the_slowest_gpu_determines_matmul_time_but_not_memory_time():
    alike = vgpu.CostModel(vgpu.PRESETS["K80"], kernel_s=0.0)
    product, read = Workload(10**12, 0), Workload(0, 10**9)

    def times(count, spread=0.1):
        costs = dataclasses.replace(alike, speed_spread=spread, slowest_of=count)
        return [costs.kernel_time_s(w) / alike.kernel_time_s(w) for w in (product, read)]

    # The larger of two normal numbers is 1 / sqrt(pi) standard deviations above the mean, and the
    # largest of three 1.5 times as far.
    assert times(1) == [pytest.approx(1), 1]
    assert times(2) == [pytest.approx(1 + 0.1 / math.sqrt(math.pi), abs=1e-4), 1]
    assert times(3) == [pytest.approx(1 + 0.15 / math.sqrt(math.pi), abs=1e-4), 1]
    assert times(1000, spread=0) == [1, 1]


def test_the_expected_slowest_matches_random_draws():
    torch.manual_seed(0)
    for count in (8, 128, 3072):
        drawn = torch.randn(4000, count).amax(1).mean().item()
        assert expected_largest(count) == pytest.approx(drawn, rel=0.01)


REFUSED = [
    *[("arithmetic_share", share, "in (0, 1]") for share in (0, -0.1, 1.01, math.nan, "0.5")],
    ("locked_share", 2, "in (0, 1]"),
    *[
        ("kernel_s", time_s, "a finite, non-negative")
        for time_s in (-1e-6, math.nan, math.inf, None)
    ],
    *[("gpus_per_host", count, "an integer of at least 0") for count in (-8, 2.5)],
    *[("slowest_of", count, "an integer of at least 1") for count in (0, math.nan, True)],
    *[("speed_spread", spread, "at least 0 and below 1") for spread in (-0.1, 1, math.nan)],
]


@pytest.mark.parametrize(("name", "value", "wanted"), REFUSED)
def test_a_cost_model_rejects_nonsensical_values(name, value, wanted):
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {wanted}") + f".* {value!r}"):
        vgpu.CostModel(vgpu.PRESETS["K80"], **{name: value})


def test_matmul_flops_and_bytes_match_the_formula():
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    work = work_of(ATEN.mm.default, (a, b), {}, a @ b)
    assert work[:3] == (2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4), "product")


def test_in_place_operations_read_and_write_and_expanded_tensors_are_read_once():
    x = torch.ones(100)
    assert work_of(ATEN.add_.Tensor, (x, x), {}, x).size_bytes == 3 * 400
    row = torch.ones(10).expand(1000, 10)
    assert work_of(ATEN.sum.default, (row,), {}, torch.ones(())).size_bytes == 40 + 4


@pytest.mark.parametrize(
    ("operator", "args", "out", "times"),
    [
        (ATEN.zero_.default, ("x",), None, 1),
        (ATEN.normal_.default, ("x",), None, 1),
        (ATEN.bernoulli_.float, ("x", 0.5), None, 1),
        (ATEN._foreach_zero_.default, (["x"],), None, 1),
        (ATEN.zeros_like.default, ("x",), None, 1),
        (ATEN._foreach_copy_.default, (["x"], ["y"]), None, 2),
        (ATEN._foreach_add_.List, (["x"], ["y"]), None, 3),
        (ATEN.add.out, ("x", "y"), "z", 3),
        (ATEN.add.out, ("x", "y"), "x", 3),
        (ATEN._chunk_cat.out, (["x", "y"], 0, 1), "wide", 4),
    ],
    ids=str,
)
def test_tensors_that_are_overwritten_are_not_read(operator, args, out, times):
    tensors = {name: torch.ones(100) for name in "xyz"} | {"wide": torch.ones(1, 200)}
    args = [[tensors[x] for x in a] if isinstance(a, list) else tensors.get(a, a) for a in args]
    kwargs = {} if out is None else {"out": tensors[out]}
    work = work_of(operator, tuple(args), kwargs, operator(*args, **kwargs))
    assert work.size_bytes == times * 400


SOME, ROWS, TABLE = torch.arange(4), torch.ones(4, 10), torch.ones(1000, 10)


@pytest.mark.parametrize(
    ("operator", "args", "size_bytes"),
    [
        (ATEN.embedding.default, (TABLE, SOME), 4 * 8 + 2 * 160),
        (ATEN.index.Tensor, (TABLE, [SOME]), 4 * 8 + 2 * 160),
        (ATEN.index_select.default, (TABLE, 0, SOME), 4 * 8 + 2 * 160),
        (ATEN.gather.default, (TABLE, 0, SOME[:, None]), 4 * 8 + 2 * 16),
        (ATEN.index_select.default, (ROWS, 0, torch.zeros(100, dtype=torch.int64)), 800 + 4160),
        (ATEN.index_add_.default, (TABLE, 0, SOME, ROWS), 4 * 8 + 3 * 160),
        (ATEN.index_copy_.default, (TABLE, 0, SOME, ROWS), 4 * 8 + 2 * 160),
        (ATEN.scatter_add_.default, (TABLE, 0, SOME[:, None], ROWS), 4 * 8 + 2 * 16 + 160),
        (ATEN.index_put_.default, (TABLE, [SOME], ROWS[:1]), 4 * 8 + 2 * 160 + 40),
        (ATEN.index_put_.default, (TABLE, [None, SOME], ROWS[0, 0]), 4 * 8 + 2 * 16_000 + 4),
        (ATEN.index_put_.default, (TABLE, [TABLE > 0], ROWS[0, 0]), 10_000 + 2 * 40_000 + 4),
        (ATEN.scatter_.value, (TABLE, 0, SOME[:, None], 2.0), 4 * 8 + 16),
        (ATEN.index_fill_.int_Scalar, (TABLE, -2, SOME, 2.0), 4 * 8 + 160),
        (ATEN.index_fill_.int_Scalar, (TABLE, 1, SOME, 2.0), 4 * 8 + 16_000),
        (ATEN.fill_.Tensor, (ROWS, torch.ones(())), 160 + 4),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_only_the_chosen_rows_of_a_table_are_read_or_written(operator, args, size_bytes):
    result, names = operator(*args), [each.name for each in operator._schema.arguments]
    assert work_of(operator, args, {}, result).size_bytes == size_bytes
    by_name = dict(zip(names, args, strict=False))
    assert work_of(operator, (), by_name, result).size_bytes == size_bytes


def test_values_that_are_combined_with_new_ones_are_read():
    args, kwargs = (TABLE, 0, SOME[:, None], 2.0), {"reduce": "add"}
    work = work_of(ATEN.scatter_.value_reduce, args, kwargs, TABLE)
    assert work.size_bytes == 4 * 8 + 2 * 16


@pytest.mark.parametrize(("scale", "times"), [(None, 7), (torch.ones(()), 8)])
def test_a_fused_optimizer_writes_parameters_and_state_and_scaled_gradients(scale, times):
    lists = [[torch.ones(100)] for _ in range(4)]
    step = [torch.ones(())]
    factors = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8)
    kwargs = dict(factors, amsgrad=False, maximize=False, grad_scale=scale)
    work = work_of(ATEN._fused_adamw_.default, (*lists, [], step), kwargs, None)
    assert work.size_bytes == times * 400 + (4 if scale is None else 8)


def test_half_precision_uses_tensor_cores():
    a = torch.ones(8, 8, dtype=torch.float16)
    assert work_of(ATEN.mm.default, (a, a), {}, a).arithmetic == "float16"
    assert work_of(ATEN.add.Tensor, (a, a), {}, a).arithmetic == "float32"  # nothing to multiply


@pytest.mark.parametrize(("gpu", "tflops"), [("V100", 15.7), ("A100", 312), ("H100", 989)])
def test_bfloat16_uses_tensor_cores_since_the_a100(gpu, tflops):
    a = torch.ones(8, 8, dtype=torch.bfloat16)
    assert work_of(ATEN.mm.default, (a, a), {}, a).arithmetic == "bfloat16"
    costs = vgpu.CostModel(vgpu.PRESETS[gpu], arithmetic_share=1.0, kernel_s=0.0)
    assert costs.kernel_time_s(Workload(10**12, 0, "bfloat16")) == pytest.approx(1 / tflops)


def scaled_mm(a, b, scale):
    """Call the public function, which is a different operator."""
    recipe = functional.ScalingType.TensorWise
    return functional.scaled_mm(a, b, scale, recipe, scale, recipe, output_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "multiply",
    [lambda a, b, scale: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16), scaled_mm],
    ids=["torch._scaled_mm", "torch.nn.functional.scaled_mm"],
)
def test_float8_matmuls_use_the_float8_peak(multiply):
    product = torch.ones(2048, 2048, dtype=torch.float8_e4m3fn)
    one = torch.ones(())
    with vgpu.enable(1, gpu="H100"), vgpu.shapes_only():
        a, b, scale = product.to("vgpu:0"), product.to("vgpu:0").t(), one.to("vgpu:0")
        with vgpu.record(kernel_s=0.0, arithmetic_share=1e-3, memory_share=1.0) as timeline:
            multiply(a, b, scale)
    (event,) = timeline.events
    assert event.duration_s == pytest.approx(2 * 2048**3 / (1e-3 * 1979e12), rel=0.1)


@pytest.mark.parametrize("gpu", ["V100", "A100"])
def test_a_gpu_without_float8_rejects_float8_matmuls(gpu):
    with pytest.raises(ValueError, match="can't multiply float8 tensors"):
        vgpu.CostModel(vgpu.PRESETS[gpu]).kernel_time_s(Workload(10**12, 0, "float8"))


@pytest.fixture
def settings():
    """torch's TF32 settings, restored after the test."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32, torch._C._get_cudnn_allow_tf32()
    yield products
    products.allow_tf32 = before[0]
    _allow_in_convolutions(before[1])


def _allow_in_convolutions(allowed):
    """Set what torch.backends.cudnn.allow_tf32 sets; torch's test suites lock that name."""
    torch._C._set_cudnn_allow_tf32(allowed)


def a_product_and_a_convolution_s():
    """Return the seconds for 1 TFLOP each in float32 on an A100, with torch's current settings."""
    costs = vgpu.CostModel(vgpu.PRESETS["A100"], arithmetic_share=1.0, kernel_s=0.0)
    return [costs.kernel_time_s(Workload(10**12, 0, kind)) for kind in ("product", "convolution")]


def test_tf32_is_used_where_torchs_settings_allow_it(settings):
    plain, tf32 = 1 / 19.5, 1 / 156  # TFLOP/s from the A100's datasheet
    assert a_product_and_a_convolution_s() == pytest.approx([plain, tf32])  # torch's defaults
    _allow_in_convolutions(False)
    assert a_product_and_a_convolution_s() == pytest.approx([plain, plain])
    settings.allow_tf32 = True
    assert a_product_and_a_convolution_s() == pytest.approx([tf32, plain])


@pytest.mark.parametrize("gpu", ["K80", "V100"])
def test_gpus_before_the_a100_have_no_tf32(gpu):
    spec = vgpu.PRESETS[gpu]
    costs = vgpu.CostModel(spec, arithmetic_share=1.0, kernel_s=0.0)
    found_s = costs.kernel_time_s(Workload(10**12, 0, "convolution"))
    assert found_s == pytest.approx(10**12 / spec.fp32_flop_per_s)


def test_operations_say_whether_they_are_matmuls_or_convolutions():
    image, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    with vgpu.enable(1, gpu="A100"):
        image, weight = image.to("vgpu:0"), weight.to("vgpu:0").requires_grad_()
        with vgpu.record(kernel_s=0.0, arithmetic_share=1e-6) as timeline:
            nn.functional.conv2d(image, weight).sum().backward()
            weight.view(4, 27) @ weight.view(27, 4)
    rates = {e.name: e.flop / e.duration_s / 1e6 for e in timeline.events if e.flop}
    assert rates == {
        "convolution": pytest.approx(156, rel=1e-6),
        "convolution_backward": pytest.approx(156, rel=1e-6),
        "mm": pytest.approx(19.5 / 108, rel=1e-6),  # one tile, on one of 108 multiprocessors
    }


def test_a_setting_changed_during_a_recording_applies_from_then_on(settings):
    with vgpu.enable(1, gpu="A100"), vgpu.shapes_only():
        rows, columns = 9 * 256, 12 * 128  # a tile for each of 108 multiprocessors
        a = torch.empty(rows, 4096, device="vgpu:0")
        b = torch.empty(4096, columns, device="vgpu:0")
        with vgpu.record() as timeline:
            a @ b
            settings.allow_tf32 = True
            a @ b
        settings.allow_tf32 = False
        assert vgpu.replay(timeline) == timeline
    to_start_and_write_s = 2e-6 + 4 * rows * columns / (1555e9 * 0.8)
    slow, fast = (event.duration_s - to_start_and_write_s for event in timeline.events)
    assert slow == pytest.approx(8 * fast)  # 156 over 19.5


@pytest.mark.parametrize(
    ("link", "count", "gigabytes_per_s"),
    [
        ("NVLink 2", 2, 50),  # two of a V100's six links lead to the same neighbor
        ("NVLink 2", 3, 100),
        ("NVLink 2", 4, 150),
        ("NVLink 2", 8, 150),
        ("NVLink 1", 2, 20),
        ("NVLink 1", 8, 80),
        ("NVLink 3", 2, 300),  # NVSwitch: a pair has all links
        ("NVLink 4", 8, 450),
    ],
)
def test_a_group_uses_only_the_links_among_its_gpus(link, count, gigabytes_per_s):
    assert vgpu.LINKS[link].among_bytes_per_s(count) == gigabytes_per_s * 1e9


# A GPU sends 1 GB/s and needs 1 µs per message; 4 MB among 4 GPUs.
MILLISECONDS = {
    "all_reduce": 2 * 3 * (0.001 + 1),  # 2 (n - 1) steps, a quarter of the bytes in each
    "reduce_scatter": 3 * (0.001 + 1),
    "all_gather": 3 * (0.001 + 1),
    "broadcast": 3 * 0.001 + 4,  # all bytes pass through each GPU, with three consecutive hops
    "reduce": 3 * 0.001 + 4,
    "all_to_all": 0.001 + 3,  # a quarter to each of the three others
    "gather": 0.001 + 3,
    "scatter": 0.001 + 3,
    "send": 0.001 + 4,
    "recv": 0.001 + 4,
    "permute": 0.001 + 4,
    "barrier": 2 * 3 * (0.001 + 1),  # like an all-reduce
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_times_match_hand_calculations(name):
    link = vgpu.Link("test", 1e9, 1e-6, "made for this test")
    costs = vgpu.CostModel(vgpu.PRESETS["V100"], link=link, link_share=1.0)
    found_s = costs.collective_time_s(name, 4 * 10**6, 4)
    assert found_s == pytest.approx(MILLISECONDS[name] * 1e-3, rel=1e-12)
    assert costs.collective_time_s(name, 4 * 10**6, 1) == 0


@pytest.mark.parametrize(
    ("name", "megabytes", "here", "there", "milliseconds"),
    [
        # All but a fifth goes to and from the lone GPU, at 0.5 GB/s.
        ("all_gather", 4, 4, 1, 3 * 0.001 + 0.010 + 6.4),
        ("reduce_scatter", 4, 4, 1, 3 * 0.001 + 0.010 + 6.4),
        ("all_reduce", 4, 4, 1, 2 * (3 * 0.001 + 0.010 + 6.4)),
        ("broadcast", 4, 4, 1, 3 * 0.001 + 0.010 + 8),
        ("all_to_all", 4, 4, 1, 0.010 + 6.4),
        # Two GPUs have two adapters for a ring, and each sends two thirds to the other host.
        ("all_gather", 4, 4, 2, 4 * 0.001 + 0.010 + 10 / 3),
        ("all_to_all", 4, 4, 2, 0.010 + 16 / 3),
        # A tree, limited by the chain in the host with four GPUs.
        ("barrier", 2e-6, 4, 2, 2 * (3 * 0.001 + 0.010) + 4e-6 / 0.92),
        ("all_gather", 4, 1, 1, 0.010 + 4),
        ("all_to_all", 4, 1, 1, 0.010 + 4),
    ],
)
def test_the_host_with_the_fewest_gpus_slows_down_its_group(
    name, megabytes, here, there, milliseconds
):
    link = vgpu.Link("test", 1e9, 1e-6, "made for this test", pair_bytes_per_s=1e9)
    network = vgpu.Network("test", 0.5e9, 10e-6, "made for this test")
    costs = vgpu.CostModel(
        vgpu.PRESETS["V100"], link, link_share=1, network=network, gpus_per_host=4, network_share=1
    )
    found_s = costs.group_time_s(name, megabytes * 1e6, [*range(here), *range(4, 4 + there)])
    assert found_s == pytest.approx(milliseconds * 1e-3, rel=1e-9)


def test_an_unknown_collective_is_rejected():
    costs = vgpu.CostModel(vgpu.PRESETS["V100"])
    with pytest.raises(ValueError, match="no collective is called 'gossip'; use one of all_reduce"):
        costs.collective_time_s("gossip", 1, 2)
    with pytest.raises(ValueError, match="broadcast among 0 GPUs"):
        costs.collective_time_s("broadcast", 1, 0)


def test_link_bandwidths_match_their_standards():
    found = {name: round(link.bandwidth_bytes_per_s / 1e9, 1) for name, link in vgpu.LINKS.items()}
    assert [found[f"PCIe {n}"] for n in (2, 3, 4, 5)] == [8.0, 15.8, 31.5, 63.0]
    assert [2 * found[f"NVLink {n}"] for n in (1, 2, 3, 4)] == [160, 300, 600, 900]


def test_fitting_finds_the_share_and_rejects_impossible_times():
    assert vgpu.fit_share(lambda share: 1.5 / share, 6.0) == pytest.approx(0.25, rel=1e-4)
    with pytest.raises(ValueError, match="no share"):
        vgpu.fit_share(lambda share: 1.5 / share, 1.0)


def test_fitting_warns_if_the_time_jumps_past_the_measurement():
    with pytest.warns(RuntimeWarning, match=r"at 0\.5000 the time jumps from 3 to 2 s"):
        share = vgpu.fit_share(lambda share: 1.5 / share if share < 0.5 else 1 / share, 2.5)
    assert share == pytest.approx(0.5, rel=1e-3)
