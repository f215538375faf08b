"""Time that failures and checkpoints take from a training run: simulated, and by the usual formulas.

A failure of any GPU stops all of them. The run then restarts and computes once more what it had
done since its last checkpoint. Failures come at a constant rate, whatever happened before, also
while a checkpoint is written or a restart is under way (an exponential distribution).

Left out: checkpoints that are written beside the training, and GPUs that are slow or wrong without
failing.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Grattafiori et al., 2024, The Llama 3 herd of models, 3.3.4: 419 unexpected interruptions in 54 days
# on 16,384 H100s.
LLAMA_3_FAILURES_PER_GPU_S = 419 / (54 * 86_400 * 16_384)

MOST_FAILURES = 10_000_000
"""Limit of what a simulation expects, and of its parts; it takes a second for some 400,000 of them."""


def mean_time_between_failures_s(
    gpus: int, failures_per_gpu_s: float = LLAMA_3_FAILURES_PER_GPU_S
) -> float:
    """Seconds from one failure to the next, on average, of a training run on so many GPUs."""
    if not 1 <= gpus < math.inf or not 0 < failures_per_gpu_s < math.inf:
        raise ValueError(
            f"{gpus} GPUs that fail {failures_per_gpu_s} times a second: both must be positive and "
            "finite"
        )
    return 1 / (gpus * failures_per_gpu_s)


def best_interval_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose least: sqrt(2 · cost · MTBF).

    Young, 1974, A first order approximation to the optimum checkpoint interval. It holds where a
    checkpoint takes much less time than passes between failures.
    """
    _check_finite(checkpoint_s=checkpoint_s)
    _check_positive(checkpoint_s=checkpoint_s, between_failures_s=between_failures_s)
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def expected_goodput(
    interval_s: float, checkpoint_s: float, restart_s: float, between_failures_s: float
) -> float:
    """The share of all time that goes into training which lasts, from 0 to 1.

    Daly, 2006, A higher order estimate of the optimum checkpoint interval for restart dumps:
    exact for failures at a constant rate. ``between_failures_s`` may be infinite.
    """
    _check_finite(interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    _check_positive(interval_s=interval_s, between_failures_s=between_failures_s)
    part_s = interval_s + checkpoint_s
    expected = part_s / between_failures_s  # failures while a part takes its time
    if expected > 700:
        return 0.0  # to within 1e-300; beyond, e^expected is no float
    lasts = expected / math.expm1(expected) if expected else 1.0
    return interval_s / part_s * lasts * math.exp(-restart_s / between_failures_s)


@dataclass(frozen=True)
class Goodput:
    """Where the time of a training run went; the parts add up to ``total_s``."""

    training_s: float  # what lasts
    lost_s: float  # training and checkpoints that a failure undid
    checkpoints_s: float
    restarts_s: float  # those that failed as well included
    failures: int

    @property
    def total_s(self) -> float:
        return self.training_s + self.lost_s + self.checkpoints_s + self.restarts_s

    @property
    def share(self) -> float:
        """Of all time, what went into training that lasts."""
        return self.training_s / self.total_s


def simulated(
    training_s: float,
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    between_failures_s: float,
    seed: int = 0,
) -> Goodput:
    """A training of ``training_s`` seconds with failures drawn at random.

    ValueError where more than ``MOST_FAILURES`` are expected.
    """
    _check_training(training_s, interval_s, checkpoint_s, restart_s)
    _check_positive(between_failures_s=between_failures_s)
    if between_failures_s == math.inf:
        return with_failures_at(training_s, interval_s, checkpoint_s, restart_s, ())
    costs = (checkpoint_s, restart_s, between_failures_s)
    share = expected_goodput(min(interval_s, training_s), *costs)
    if training_s / between_failures_s > MOST_FAILURES * share:
        raise ValueError(
            f"a failure every {between_failures_s:,.0f} s lets parts of {interval_s:,.0f} s, with "
            f"checkpoints of {checkpoint_s:,.0f} s and restarts of {restart_s:,.0f} s, pass so "
            f"rarely that more than {MOST_FAILURES:,} failures are expected in {training_s:,.0f} s "
            f"of training: save more often, or train for less. expected_goodput says {share:.3g}"
        )
    failures_s = _drawn(between_failures_s, seed)
    return with_failures_at(training_s, interval_s, checkpoint_s, restart_s, failures_s)


def _drawn(between_failures_s: float, seed: int) -> Iterator[float]:
    draws, time_s = random.Random(seed), 0.0
    while True:
        time_s += draws.expovariate(1 / between_failures_s)
        yield time_s


def with_failures_at(
    training_s: float,
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    failures_s: Iterable[float],
) -> Goodput:
    """A training with failures at given times, in seconds since it began, in order.

    After each ``interval_s`` of training comes a checkpoint, the last of them at the end.
    """
    _check_training(training_s, interval_s, checkpoint_s, restart_s)
    coming = _in_order(failures_s)
    next_s = next(coming, math.inf)
    now_s = done_s = lost_s = checkpoints_s = restarts_s = 0.0
    failures, restarting = 0, False
    while done_s < training_s:
        part_s = min(interval_s, training_s - done_s)
        end_s = now_s + (restart_s if restarting else part_s + checkpoint_s)
        if next_s < end_s:
            failures += 1
            if restarting:
                restarts_s += next_s - now_s
            else:
                lost_s += next_s - now_s
            now_s, restarting = next_s, True
            next_s = next(coming, math.inf)
        elif restarting:
            restarts_s += restart_s
            now_s, restarting = end_s, False
        else:
            done_s += part_s
            checkpoints_s += checkpoint_s
            now_s = end_s
    return Goodput(training_s, lost_s, checkpoints_s, restarts_s, failures)


def _in_order(failures_s: Iterable[float]) -> Iterator[float]:
    last_s = 0.0
    for time_s in failures_s:
        if not time_s >= last_s:
            raise ValueError(
                f"failures_s must be times since the beginning, in order, got {time_s} after {last_s}"
            )
        last_s = time_s
        yield time_s


def _check_training(
    training_s: float, interval_s: float, checkpoint_s: float, restart_s: float
) -> None:
    """An infinite ``interval_s`` saves at the end only."""
    _check_positive(training_s=training_s, interval_s=interval_s)
    _check_finite(training_s=training_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    if training_s / interval_s > MOST_FAILURES:
        raise ValueError(
            f"{training_s} s of training have more than {MOST_FAILURES:,} parts of {interval_s} s: "
            "save less often, or train for less"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _check_finite(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")
