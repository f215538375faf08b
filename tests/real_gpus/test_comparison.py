"""The comparison of real and virtual GPUs, tested here between virtual ones."""

import copy
import functools
from itertools import pairwise

import pytest
from real_gpus import comparison


@functools.cache
def observed(gpu="H100"):
    return comparison.observe(*comparison.virtual_command(2, gpu))


@pytest.fixture
def pair():
    """Two copies of an observation, for tests to change."""
    return copy.deepcopy(observed()), copy.deepcopy(observed())


def test_a_gpu_compared_with_itself_has_no_differences(pair):
    real, virtual = pair
    assert comparison.differences(real, virtual) == []
    assert all("nothing was raised" not in message for message in real["errors"].values())
    assert all(size > 0 for sizes in real["peaks"].values() for size in sizes)
    assert all(time_s > 0 for time_s in real["times"].values())
    page = comparison.page(real, virtual, "2026-11-22")
    assert page.startswith("### 2026-11-22 · 2 × Virtual H100") and "No differences." in page
    assert len(comparison._clear_pairs(real, virtual)) > 30


def test_different_messages_are_reported(pair):
    real, virtual = pair
    real["errors"]["to numpy"] = "TypeError: no"
    (found,) = comparison.differences(real, virtual)
    assert found.startswith("error of 'to numpy': real 'TypeError: no', virtual \"TypeError: can't")


def test_a_missing_error_is_reported(pair):
    real, virtual = pair
    real["errors"]["matmul, CPU"] = "nothing was raised"
    assert "real 'nothing was raised'" in comparison.differences(real, virtual)[0]


def test_a_single_extra_byte_is_reported(pair):
    real, virtual = pair
    real["peaks"]["MLP, DataParallel"][1] += 512
    (found,) = comparison.differences(real, virtual)
    assert "peak of 'MLP, DataParallel' on GPU 1" in found and "(+0.00%)" in found


def test_times_in_a_different_order_are_reported(pair):
    real, virtual = pair
    real["times"]["float32 matmul, 2048"] = 1e-9
    found = comparison.differences(real, virtual)
    assert found and all("order of times" in each for each in found)
    assert any("'float32 matmul, 2048' takes longer than 'float32 matmul, 256'" in e for e in found)


def test_similar_times_may_swap_places(pair):
    real, virtual = pair
    by_time = sorted(virtual["times"], key=virtual["times"].get)
    times = virtual["times"]
    near = [p for p in pairwise(by_time) if times[p[1]] < 1.5 * times[p[0]]]
    for shorter, longer in near[:1]:
        real["times"][shorter], real["times"][longer] = times[longer], times[shorter]
    assert near and comparison.differences(real, virtual) == []


def test_observations_missing_on_one_side_are_reported(pair):
    real, virtual = pair
    del virtual["times"]["convolution of 256 images"]
    (found,) = comparison.differences(real, virtual)
    assert found == "times: 'convolution of 256 images' was observed only on real GPUs"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("on vgpu:0 in wrapper_VGPU_mm", "on cuda:0 in wrapper_CUDA_mm"),
        ("CUDA error: invalid device ordinal\nadvice", "CUDA error: invalid device ordinal"),
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB",
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
    ],
)
def test_messages_are_compared_without_machine_specific_parts(message, expected):
    assert comparison.in_cuda_s_words(message) == expected


def test_preset_for_finds_the_virtual_gpu_of_a_real_one():
    assert comparison.preset_for("NVIDIA A100-SXM4-80GB") == "A100"
    assert comparison.preset_for("NVIDIA H200") == "H200"
    assert comparison.preset_for("NVIDIA L4") == "H100"


def test_a_failed_programs_errors_are_shown():
    with pytest.raises(RuntimeError, match="No module named nowhere"):
        comparison.observe("-m", "nowhere")
