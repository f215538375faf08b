"""Time lost to failures: a case by hand, and the simulation against the formulas."""

import math

import pytest

from vgpu.plan.failures import (
    Goodput,
    best_interval_s,
    expected_goodput,
    mean_time_between_failures_s,
    simulated,
    with_failures_at,
)


def test_by_hand():
    # 10 s, 2 s of checkpoint; a failure at 20 s undoes 8 s; 3 s to restart; then two more parts.
    found = with_failures_at(30, 10, 2, 3, [20])
    assert found == Goodput(training_s=30, lost_s=8, checkpoints_s=6, restarts_s=3, failures=1)
    assert found.total_s == 47
    assert found.share == 30 / 47


def test_a_checkpoint_and_a_restart_may_fail():
    # At 11 s during the checkpoint, at 13 s during the restart, which begins anew.
    found = with_failures_at(10, 10, 2, 3, [11, 13])
    assert found == Goodput(training_s=10, lost_s=11, checkpoints_s=2, restarts_s=5, failures=2)


def test_a_last_part_may_be_short():
    found = with_failures_at(25, 10, 1, 3, [])
    assert found == Goodput(training_s=25, lost_s=0, checkpoints_s=3, restarts_s=0, failures=0)


@pytest.mark.parametrize("interval_s", [600, 3_600, 20_000])
@pytest.mark.parametrize("restart_s", [0, 900])
def test_the_simulation_agrees_with_the_formula(interval_s, restart_s):
    costs = {"checkpoint_s": 120, "restart_s": restart_s, "between_failures_s": 10_000}
    found = simulated(5_000 * interval_s, interval_s, **costs)
    assert found.failures > 200
    # The mean of thousands of failures is within a few percent of what is expected.
    assert found.share == pytest.approx(expected_goodput(interval_s, **costs), rel=0.04)


def test_without_failures_only_checkpoints_take_time():
    assert (
        simulated(100, 10, 2, 3, math.inf).share
        == 100 / 120
        == expected_goodput(10, 2, 3, math.inf)
    )
    assert with_failures_at(100, math.inf, 2, 3, []).total_s == 102  # saved at the end


def test_what_hardly_ever_lasts():
    """The formula overflowed, and the simulation drew failures for years."""
    between_failures_s = 11_141
    assert expected_goodput(8e6, 60, 300, between_failures_s) == 0
    assert expected_goodput(3_600, 60, 1e9, between_failures_s) == 0
    share = expected_goodput(120 * 2**11, 60, 300, between_failures_s)
    assert 0 < share < 1e-7
    with pytest.raises(
        ValueError, match=r"more than 10,000,000 failures .* save more often"
    ) as told:
        simulated(300 * between_failures_s, 120 * 2**11, 60, 300, between_failures_s)
    assert f"expected_goodput says {share:.3g}" in str(told.value)
    # Less training is in the middle of its only part when it ends.
    assert simulated(600, 120 * 2**11, 60, 300, between_failures_s).share > 0.5


def test_young_finds_the_best_interval():
    costs = {"checkpoint_s": 60, "restart_s": 300, "between_failures_s": 11_000}
    best = best_interval_s(60, 11_000)
    assert best == pytest.approx((2 * 60 * 11_000) ** 0.5)
    at_best = expected_goodput(best, **costs)
    tried = [expected_goodput(best * factor / 100, **costs) for factor in range(20, 500)]
    assert at_best > max(tried) - 1e-4
    assert at_best > expected_goodput(best / 4, **costs) + 0.05
    assert at_best > expected_goodput(best * 4, **costs) + 0.05


def test_llama_3_failed_every_three_hours():
    """54 days, 419 interruptions."""
    assert mean_time_between_failures_s(16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert mean_time_between_failures_s(8) / 86_400 == pytest.approx(54 / 419 * 2048)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mean_time_between_failures_s(0), "0 GPUs"),
        (lambda: best_interval_s(0, 1), "checkpoint_s must be positive, got 0"),
        (lambda: expected_goodput(0, 1, 1, 1), "interval_s must be positive, got 0"),
        (lambda: mean_time_between_failures_s(math.nan), "nan GPUs"),
        (lambda: mean_time_between_failures_s(8, math.nan), "fail nan times"),
        (lambda: best_interval_s(math.inf, 1), "checkpoint_s must be finite"),
        (lambda: expected_goodput(9, -9, 1, 1), "checkpoint_s must .* not negative, got -9"),
        (lambda: expected_goodput(9, 1, -30_000, 99), "restart_s must .* not negative, got -30000"),
        (lambda: expected_goodput(9, 1, math.nan, 99), "restart_s must be finite .* got nan"),
        (lambda: with_failures_at(1, 1, -1, 0, []), "checkpoint_s must .* not negative, got -1"),
        (lambda: with_failures_at(math.inf, 1, 1, 0, []), "training_s must be finite"),
        (lambda: with_failures_at(1e12, 1e-3, 1, 0, []), "more than 10,000,000 parts of 0.001 s"),
        (lambda: with_failures_at(1000, 100, 10, 10, [500, 50, 700]), "in order, got 50 after 500"),
        (lambda: with_failures_at(1000, 100, 10, 10, [-5]), "in order, got -5 after 0"),
        (lambda: with_failures_at(1000, 100, 10, 10, [math.nan]), "in order, got nan"),
        (lambda: simulated(1, 1, 1, 1, -5), "between_failures_s must be positive, got -5"),
    ],
)
def test_what_cannot_be(call, words):
    with pytest.raises(ValueError, match=words):
        call()
