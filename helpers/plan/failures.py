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


def mean_time_between_failures_s(
    gpus: int, failures_per_gpu_s: float = LLAMA_3_FAILURES_PER_GPU_S
) -> float:
    """Seconds from one failure to the next, on average, of a training run on so many GPUs."""
    if gpus < 1 or failures_per_gpu_s <= 0:
        raise ValueError(
            f"{gpus} GPUs that fail {failures_per_gpu_s} times a second: both must be positive"
        )
    return 1 / (gpus * failures_per_gpu_s)


def best_interval_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose least: sqrt(2 · cost · MTBF).

    Young, 1974, A first order approximation to the optimum checkpoint interval. It holds where a
    checkpoint takes much less time than passes between failures.
    """
    _positive(checkpoint_s=checkpoint_s, between_failures_s=between_failures_s)
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def expected_goodput(
    interval_s: float, checkpoint_s: float, restart_s: float, between_failures_s: float
) -> float:
    """The share of all time that goes into training which lasts, from 0 to 1.

    Daly, 2006, A higher order estimate of the optimum checkpoint interval for restart dumps:
    exact for failures at a constant rate.
    """
    _positive(interval_s=interval_s, between_failures_s=between_failures_s)
    mean_s = between_failures_s
    failing = math.expm1((interval_s + checkpoint_s) / mean_s)
    return interval_s / (mean_s * math.exp(restart_s / mean_s) * failing)


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
    """A training of ``training_s`` seconds with failures drawn at random."""
    _positive(between_failures_s=between_failures_s)
    return played(training_s, interval_s, checkpoint_s, restart_s, _drawn(between_failures_s, seed))


def _drawn(between_failures_s: float, seed: int) -> Iterator[float]:
    draws, time_s = random.Random(seed), 0.0
    while True:
        time_s += draws.expovariate(1 / between_failures_s)
        yield time_s


def played(
    training_s: float,
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    failures_s: Iterable[float],
) -> Goodput:
    """A training with failures at given times, in seconds since it began, in order.

    After each ``interval_s`` of training comes a checkpoint, the last of them at the end.
    """
    _positive(training_s=training_s, interval_s=interval_s)
    if checkpoint_s < 0 or restart_s < 0:
        raise ValueError(
            f"a checkpoint of {checkpoint_s} s and a restart of {restart_s} s: neither may be negative"
        )
    coming = iter(failures_s)
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


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
