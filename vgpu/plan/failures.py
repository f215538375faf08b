"""The time that a training run loses to failures and checkpoints, by simulation and by formula.

If any GPU fails, all of them stop. The run then restarts, and repeats everything since its last
checkpoint. Failures occur at a constant rate (an exponential distribution), even while a
checkpoint is being written or a restart is in progress.

Not modeled: asynchronous checkpoints, and GPUs that slow down or compute wrong results instead of
failing.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, repeat

from vgpu.time.costs import check_seconds

# Grattafiori et al., 2024, The Llama 3 herd of models, 3.3.4: 419 unexpected interruptions in
# 54 days on 16,384 H100s.
LLAMA_3_FAILURES_PER_GPU_S = 419 / (54 * 86_400 * 16_384)

MOST_EVENTS = 10_000_000
"""The limit for a simulation's expected failures and checkpoints; 400,000 take a second."""


def mean_time_between_failures_s(gpus: int) -> float:
    """Return the mean time between failures on ``gpus`` GPUs like those of Llama 3's training."""
    _check_positive(gpus=gpus)
    return 1 / (gpus * LLAMA_3_FAILURES_PER_GPU_S)


def best_interval_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Return the checkpoint interval that loses the least time: sqrt(2 · checkpoint time · MTBF).

    The formula holds if a checkpoint takes much less time than the mean time between failures.
    Source: Young, 1974, A first order approximation to the optimum checkpoint interval.
    """
    _check_positive(checkpoint_s=checkpoint_s, between_failures_s=between_failures_s)
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def expected_goodput(
    interval_s: float, checkpoint_s: float, restart_s: float, between_failures_s: float
) -> float:
    """Return the fraction of the total time spent on training that isn't lost, from 0 to 1.

    The formula is exact for failures at a constant rate. Source: Daly, 2006, A higher order
    estimate of the optimum checkpoint interval for restart dumps.
    """
    _check_positive(interval_s=interval_s, between_failures_s=between_failures_s)
    check_seconds("checkpoint_s", checkpoint_s)
    check_seconds("restart_s", restart_s)
    part_s = interval_s + checkpoint_s
    expected = part_s / between_failures_s  # expected failures during one interval
    if expected > 700:
        return 0.0  # to within 1e-300; e^expected would overflow
    lasts = expected / math.expm1(expected)
    return interval_s / part_s * lasts * math.exp(-restart_s / between_failures_s)


@dataclass(frozen=True)
class Goodput:
    """The duration of a training run, and how much of it was training that wasn't lost."""

    training_s: float
    total_s: float
    failures: int

    @property
    def share(self) -> float:
        """The fraction of the total time spent on training that wasn't lost."""
        return self.training_s / self.total_s


def simulated(
    training_s: float,
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    between_failures_s: float,
    seed: int = 0,
) -> Goodput:
    """Simulate a training run of ``training_s`` seconds, with failures drawn at random.

    Raises ValueError if more than ``MOST_EVENTS`` failures or checkpoints are expected.
    """
    _check_positive(training_s=training_s)
    share = expected_goodput(
        min(interval_s, training_s), checkpoint_s, restart_s, between_failures_s
    )
    if training_s / min(between_failures_s, interval_s) > MOST_EVENTS * share:
        raise ValueError(
            f"with a failure every {between_failures_s:,.0f} s, intervals of {interval_s:,.0f} s, "
            f"checkpoints of {checkpoint_s:,.0f} s and restarts of {restart_s:,.0f} s, an interval "
            f"completes so rarely that more than {MOST_EVENTS:,} failures or intervals are "
            f"expected in {training_s:,.0f} s of training: choose a different interval, or a "
            f"shorter training run. expected_goodput returns {share:.3g}"
        )
    draws = random.Random(seed)
    failures_s = accumulate(draws.expovariate(1 / between_failures_s) for _ in repeat(None))
    return with_failures_at(training_s, interval_s, checkpoint_s, restart_s, failures_s)


def with_failures_at(
    training_s: float,
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    failures_s: Iterable[float],
) -> Goodput:
    """Simulate a training run with failures at these times, in order, in seconds since its start.

    A checkpoint follows every ``interval_s`` of training, and the last one comes at the end.
    """
    coming = iter(failures_s)
    next_s = next(coming, math.inf)
    now_s = done_s = 0.0
    failures, restarting = 0, False
    while done_s < training_s:
        part_s = min(interval_s, training_s - done_s)
        end_s = now_s + (restart_s if restarting else part_s + checkpoint_s)
        if next_s < end_s:
            failures += 1
            now_s, restarting = next_s, True
            next_s = next(coming, math.inf)
            continue
        if not restarting:
            done_s += part_s
        now_s, restarting = end_s, False
    return Goodput(training_s, now_s, failures)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
