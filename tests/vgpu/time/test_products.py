"""Matmuls that fill a GPU or don't: tiles, waves and split reductions, computed by hand."""

import pytest
import torch

import vgpu
from vgpu.time.workloads import Workload, work_of

V100 = vgpu.PRESETS["V100"]
TENSOR_CORES, FLOAT32_UNITS, MEMORY = 125e12, 15.7e12, 900e9  # from the V100's datasheet


def seconds(rows, inner, columns, dtype=torch.float16, batch=1):
    """Return the seconds for one matmul on a V100 that reaches all its peaks."""
    costs = vgpu.CostModel(V100, arithmetic_share=1.0, memory_share=1.0, kernel_s=0.0)
    given = torch.empty(batch, rows, inner, dtype=dtype, device="meta")
    other = torch.empty(batch, inner, columns, dtype=dtype, device="meta")
    work = work_of(torch.ops.aten.bmm.default, (given, other), {}, given @ other)
    return costs.kernel_time_s(work)


def flop(rows, inner, columns):
    return 2 * rows * inner * columns


def written_s(rows, columns, element_bytes=2):
    return element_bytes * rows * columns / MEMORY


def test_a_full_wave_computes_at_the_peak_and_is_then_written():
    # 10 x 8 tiles of 256 x 128, on 80 multiprocessors.
    rows, inner, columns = 2560, 4096, 1024
    whole_s = flop(rows, inner, columns) / TENSOR_CORES
    assert seconds(rows, inner, columns) == pytest.approx(whole_s + written_s(rows, columns))


def test_one_more_row_needs_another_wave_of_smaller_tiles():
    # 21 x 16 tiles of 128 x 64: 5 waves instead of 4, of tiles for which the L2 cache is almost
    # fast enough: 128 · 64 / (128 + 64) of 43 FLOPs per byte. Any other tile takes longer.
    rows, inner, columns = 2561, 4096, 1024
    four_waves_s = flop(2560, inner, columns) / TENSOR_CORES
    expected_s = four_waves_s * 5 / 4 / (128 * 64 / (128 + 64) / 43)
    assert seconds(rows, inner, columns) == pytest.approx(expected_s + written_s(rows, columns))


def test_float32_units_use_the_smallest_tiles_without_loss():
    # 81 x 32 tiles of 32 x 32: 32.4 waves, so 33.
    rows, inner, columns = 2561, 4096, 1024
    expected_s = flop(33 * 80 * 32, inner, 32) / FLOAT32_UNITS
    found_s = seconds(rows, inner, columns, torch.float32)
    assert found_s == pytest.approx(expected_s + written_s(rows, columns, 4))


def test_a_small_matmul_leaves_most_multiprocessors_idle():
    # 4 tiles of 32 x 32, each on one of 80 multiprocessors; a reduction over 64 elements isn't
    # split.
    whole_s = flop(64, 64, 64) / FLOAT32_UNITS
    found_s = seconds(64, 64, 64, torch.float32)
    assert found_s == pytest.approx(20 * whole_s + written_s(64, 64, 4))


def test_long_reductions_with_few_tiles_are_split():
    # 16 tiles of 256 x 128, with reductions split into 5 parts: 80 multiprocessors are busy. The
    # parts are written and read again in float32, which pays off only for long reductions;
    # otherwise, 64 tiles of 64 x 128 are used.
    rows, columns = 512, 1024
    added_s = 2 * 5 * written_s(rows, columns, 4)
    long_s = flop(rows, 16384, columns) / TENSOR_CORES + added_s
    assert seconds(rows, 16384, columns) == pytest.approx(long_s + written_s(rows, columns))
    short_s = flop(rows, 4096, columns) / TENSOR_CORES * 80 / 64 / (64 * 128 / (64 + 128) / 43)
    assert seconds(rows, 4096, columns) == pytest.approx(short_s + written_s(rows, columns))


def test_a_batch_of_matmuls_fills_the_gpu_together():
    # 8 tiles of 256 x 128 each: ten matmuls are a full wave.
    whole_s = 10 * (flop(512, 4096, 512) / TENSOR_CORES + written_s(512, 512))
    assert seconds(512, 4096, 512, batch=10) == pytest.approx(whole_s)
    assert seconds(512, 4096, 512) > 1.5 * whole_s / 10


def test_a_single_row_takes_as_long_as_reading_the_matrix():
    matrix_s = (4096 * 4096 + 2 * 4096) * 4 / MEMORY
    assert seconds(1, 4096, 4096, torch.float32) == pytest.approx(matrix_s)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize("inner", [1, 100, 5000])
def test_no_matmul_is_faster_than_the_peaks(size, inner):
    costs = vgpu.CostModel(V100, arithmetic_share=1.0, memory_share=1.0, kernel_s=0.0)
    read_and_written = 2 * (size * inner + inner * size + size * size)
    peak_s = costs.kernel_time_s(Workload(flop(size, inner, size), read_and_written, "float16"))
    assert seconds(size, inner, size) >= peak_s * (1 - 1e-12)
