"""The published model-parallel experiment, predicted with one fitted figure (claims D05 to D08)."""

import pytest

from benchmarks.split_sizes import (
    GPU,
    ONE_GPU_S,
    PUBLISHED_S,
    TWO_GPUS_S,
    TwoStages,
    fitted_share,
    one_gpu,
    seconds,
)
from helpers import vgpu


@pytest.fixture(scope="module")
def predicted_s():
    with vgpu.enable(2, gpu=GPU), vgpu.shapes_only():
        share = fitted_share()
        one_s = seconds(one_gpu(), share)
    with vgpu.enable(2, gpu=GPU, link="PCIe 3 via host"), vgpu.shapes_only():
        found = {size: seconds(TwoStages(size), share) for size in (120, 40, 20, 12, 5)}
    return {"one": one_s, **found}


def test_the_fitted_figure_is_met(predicted_s):
    assert predicted_s["one"] == pytest.approx(ONE_GPU_S, rel=1e-3)


def test_two_gpus_one_after_the_other_are_slower(predicted_s):
    predicted, published = (time_s / ONE_GPU_S - 1 for time_s in (predicted_s[120], TWO_GPUS_S))
    assert predicted > 0
    assert predicted == pytest.approx(published, abs=0.03)


@pytest.mark.parametrize("size", PUBLISHED_S)
def test_the_speed_ups_of_pipelines(size, predicted_s):
    predicted, published = (
        ONE_GPU_S / time_s - 1 for time_s in (predicted_s[size], PUBLISHED_S[size])
    )
    assert predicted == pytest.approx(published, abs=0.10)


def test_the_curve_rises_on_both_sides(predicted_s):
    assert predicted_s[12] < predicted_s[20] < predicted_s[40] < predicted_s[120]
    assert predicted_s[12] < predicted_s[5]
