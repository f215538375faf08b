"""Time lost to failures: a case computed by hand, and the simulation compared with the formulas."""

import math

import pytest

from vgpu.plan.estimate import (
    Goodput,
    best_interval_s,
    expected_goodput,
    goodput_with_failures_at,
    mean_time_between_failures_s,
    simulated_goodput,
)


@pytest.mark.parametrize(
    ("training_s", "interval_s", "checkpoint_s", "failures_s", "total_s"),
    [
        # A failure at 20 s loses 8 s; the restart takes 3 s; then two intervals remain.
        (30, 10, 2, [20], 47),
        # One failure at 11 s, during the checkpoint; one at 13 s, during the restart, which starts
        # over.
        (10, 10, 2, [11, 13], 28),
        (25, 10, 1, [], 28),  # the last interval is shorter
    ],
)
def test_a_run_with_failures_takes_the_time_computed_by_hand(
    training_s, interval_s, checkpoint_s, failures_s, total_s
):
    found = goodput_with_failures_at(training_s, interval_s, checkpoint_s, 3, failures_s)
    assert found == Goodput(training_s, total_s, len(failures_s))
    assert found.share == training_s / total_s


@pytest.mark.parametrize("interval_s", [600, 3_600, 20_000])
@pytest.mark.parametrize("restart_s", [0, 900])
def test_the_simulation_agrees_with_the_formula(interval_s, restart_s):
    costs = {"checkpoint_s": 120, "restart_s": restart_s, "between_failures_s": 10_000}
    found = simulated_goodput(5_000 * interval_s, interval_s, **costs)
    assert found.failures > 200
    # The mean over thousands of failures is within a few percent of the expected value.
    assert found.share == pytest.approx(expected_goodput(interval_s, **costs), rel=0.04)


def test_a_run_that_hardly_ever_completes_is_rejected():
    """The formula used to overflow, and the simulation used to run almost forever."""
    between_failures_s = 11_141
    assert expected_goodput(8e6, 60, 300, between_failures_s) == 0
    share = expected_goodput(120 * 2**11, 60, 300, between_failures_s)
    assert 0 < share < 1e-7
    with pytest.raises(ValueError, match=r"more than 10,000,000 failures .* different interval"):
        simulated_goodput(300 * between_failures_s, 120 * 2**11, 60, 300, between_failures_s)
    with pytest.raises(ValueError, match=r"more than 10,000,000 failures or intervals"):
        simulated_goodput(1e12, 1e-3, 1e-3, 0, 1e12)
    # A shorter run ends in the middle of its only interval.
    assert simulated_goodput(600, 120 * 2**11, 60, 300, between_failures_s).share > 0.5


def test_youngs_formula_finds_the_best_interval():
    costs = {"checkpoint_s": 60, "restart_s": 300, "between_failures_s": 11_000}
    best = best_interval_s(60, 11_000)
    assert best == pytest.approx((2 * 60 * 11_000) ** 0.5)
    at_best = expected_goodput(best, **costs)
    tried = [expected_goodput(best * factor / 100, **costs) for factor in range(20, 500)]
    assert at_best > max(tried) - 1e-4
    assert at_best > expected_goodput(best / 4, **costs) + 0.05
    assert at_best > expected_goodput(best * 4, **costs) + 0.05


def test_the_time_between_failures_matches_llama_3s():
    """54 days, with 419 interruptions."""
    assert mean_time_between_failures_s(16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert mean_time_between_failures_s(8) / 86_400 == pytest.approx(54 / 419 * 2048)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mean_time_between_failures_s(0), "gpus must be positive and finite, got 0"),
        (lambda: best_interval_s(0, 1), "checkpoint_s must be positive and finite, got 0"),
        (lambda: expected_goodput(9, -9, 1, 1), "checkpoint_s must .* non-negative .* got -9"),
        (lambda: expected_goodput(9, 1, math.nan, 99), "restart_s must be a finite, .* got nan"),
        (lambda: simulated_goodput(math.inf, 1, 1, 0, 9), "training_s must be positive and finite"),
        (
            lambda: simulated_goodput(1, 1, 1, 1, -5),
            "between_failures_s must be positive .* got -5",
        ),
    ],
)
def test_the_formula_rejects_impossible_times(call, words):
    with pytest.raises(ValueError, match=words):
        call()
