"""Time lost to failures: a case by hand, and the simulation against the formulas."""

import pytest

from helpers.plan.failures import (
    Goodput,
    best_interval_s,
    expected_goodput,
    mean_time_between_failures_s,
    played,
    simulated,
)


def test_by_hand():
    # 10 s, 2 s of checkpoint; a failure at 20 s undoes 8 s; 3 s to restart; then two more parts.
    found = played(30, 10, 2, 3, [20])
    assert found == Goodput(training_s=30, lost_s=8, checkpoints_s=6, restarts_s=3, failures=1)
    assert found.total_s == 47
    assert found.share == 30 / 47


def test_a_checkpoint_and_a_restart_may_fail():
    # At 11 s during the checkpoint, at 13 s during the restart, which begins anew.
    found = played(10, 10, 2, 3, [11, 13])
    assert found == Goodput(training_s=10, lost_s=11, checkpoints_s=2, restarts_s=5, failures=2)


def test_a_last_part_may_be_short():
    found = played(25, 10, 1, 3, [])
    assert found == Goodput(training_s=25, lost_s=0, checkpoints_s=3, restarts_s=0, failures=0)


@pytest.mark.parametrize("interval_s", [600, 3_600, 20_000])
@pytest.mark.parametrize("restart_s", [0, 900])
def test_the_simulation_agrees_with_the_formula(interval_s, restart_s):
    costs = {"checkpoint_s": 120, "restart_s": restart_s, "between_failures_s": 10_000}
    found = simulated(5_000 * interval_s, interval_s, **costs)
    assert found.failures > 200
    # The mean of thousands of failures is within a few percent of what is expected.
    assert found.share == pytest.approx(expected_goodput(interval_s, **costs), rel=0.04)


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
        (lambda: played(1, 1, -1, 0, []), "a checkpoint of -1 s"),
        (lambda: simulated(1, 1, 1, 1, -5), "between_failures_s must be positive, got -5"),
    ],
)
def test_what_cannot_be(call, words):
    with pytest.raises(ValueError, match=words):
        call()
