"""Back-of-the-envelope estimates for a training run: FLOPs, bytes, traffic, and time lost.

FLOPs, bytes and traffic are plain arithmetic on the sizes of a Llama-style transformer; the time
lost to failures and checkpoints is a formula, or a simulation with failures drawn at random.
"""

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, repeat

from vgpu import CostModel
from vgpu.collectives import table
from vgpu.plan.layout import groups, placement
from vgpu.plan.transformer import TransformerSizes
from vgpu.time.costs import check_count, check_seconds

# FLOPs and bytes


def flop_per_token(sizes: TransformerSizes, sequence: int) -> int:
    """Return the FLOPs of the model for one token, forward and backward, without recomputation.

    Each parameter in a matmul takes six FLOPs. Attention adds 12 · layers · width · sequence, where
    the width is that of all query heads or, with latent attention, the mean of queries' and values'.
    This counts full sequences although a causal mask hides half (Chowdhery et al., 2022, PaLM,
    appendix B). Embedding lookups and norms aren't matmuls and don't count.
    """
    products = sizes.token_products + sizes.vocabulary * sizes.width
    attended = sizes.query_width + sizes.attended_width
    return 6 * products + 6 * sizes.layers * attended * sequence


def state_bytes(sizes: TransformerSizes, dp_shard: int = 1) -> int:
    """Return the number of bytes that a rank's float32 parameters, gradients and Adam moments take.

    They're sharded across ``dp_shard`` ranks.
    """
    return 16 * sizes.parameters // dp_shard


# A step on a mesh
#
# A mesh has four dimensions:
#
# - ``tensor``: four exposed all-reduces of a micro-batch's hidden states in each layer (Shoeybi et
#   al., 2019, Megatron-LM);
# - ``context``: keys and values travel around a ring during attention; in the backward pass, their
#   gradients travel with them (Liu et al., 2023, Ring attention);
# - ``pipeline``: for each micro-batch, which is one sequence, hidden states go to the next stage
#   and their gradients come back; with 1F1B, only the messages that fill and drain the pipeline are
#   exposed;
# - ``data``: once per step, parameters are gathered in bfloat16 during the first forward, and
#   gradients are reduced in float32 during the last backward. The ``context`` ranks hold the same
#   parameters, so they belong to these groups, too.
#
# In each dimension, the slowest group sets the time, since the others wait for it: for example, a
# group that spans hosts while others are within one host. Times come from a ``CostModel``. Not
# modeled: embedding and loss, norms, activation memory, recomputation, launches, dimensions that
# share a link, and differences between stages.

DIMENSIONS = ("tensor", "context", "pipeline", "data")

_WORKING_BYTES = 2  # of an activation, or of a gathered parameter: bfloat16
_GRADIENT_BYTES = 4
_ADAM_BYTES = 12  # parameter and both moments in float32, sharded

_Sent = list[tuple[int, float, float, float]]


@dataclass(frozen=True)
class Traffic:
    """The traffic along one dimension in one step."""

    dimension: str
    ranks: tuple[int, ...]  # of the slowest group, or of rank 0's group if all are equally slow
    link: str
    sent_bytes: float  # by each GPU
    sending_s: float
    exposed_s: float  # the part of sending_s that isn't hidden by computation


@dataclass(frozen=True)
class MeshStep:
    """One training step on a mesh, as each of its GPUs sees it."""

    traffic: tuple[Traffic, ...]  # starting with the dimension whose ranks are neighbors
    compute_s: float
    bubble_s: float
    held_bytes: float  # parameters, gradients and optimizer state; no activations

    @property
    def seconds(self) -> float:
        return self.compute_s + self.bubble_s + sum(each.exposed_s for each in self.traffic)

    def of(self, dimension: str) -> Traffic:
        return next(each for each in self.traffic if each.dimension == dimension)


def mesh_step(
    sizes: Mapping[str, int], model: TransformerSizes, sequences: int, cost: CostModel
) -> MeshStep:
    """Estimate a training step on a mesh, for ``sequences`` sequences of ``model.sequence`` tokens.

    ``sizes`` has the size of each of ``DIMENSIONS``, starting with the one whose ranks are
    neighbors. ``cost`` describes the GPUs, their links, and the number of GPUs per host. Raises
    ValueError for sizes that don't divide the model evenly.
    """
    _check_mesh(sizes, model, sequences)
    tensor, context, pipeline, data = (sizes[name] for name in DIMENSIONS)
    micro_batches = sequences // data
    tokens = model.sequence // context  # of a micro-batch
    layers = model.layers // pipeline
    parameters = model.parameters / tensor / pipeline
    hidden_bytes = tokens * model.width * _WORKING_BYTES

    flop_per_s = cost.spec.tensor_flop_per_s * cost.arithmetic_share
    # The mask hides half of the scores. There are two matmuls, with keys and with values.
    attention_flop = model.sequence**2 * (model.query_width + model.attended_width) / tensor
    products_flop = 2 * model.sequence * model.block_products / tensor
    forward_s = layers * (attention_flop + products_flop) / context / flop_per_s
    backward_s = 2 * forward_s

    def collective(name: str, size_bytes: float, ranks: list[int]) -> tuple[float, float]:
        sent_bytes = table.sent_bytes(name, size_bytes, len(ranks))
        return sent_bytes, cost.group_time_s(name, size_bytes, ranks)

    def message(size_bytes: float, pairs: Iterable[tuple[int, int]]) -> tuple[float, float]:
        """Return the bytes, and the slowest pair's seconds if all neighbors send at once."""
        return size_bytes, max(cost.group_time_s("send", size_bytes, pair) for pair in pairs)

    # What each GPU sends in each dimension: how often, the bytes and seconds each time, and the
    # seconds of computation that hide it.
    sums, ring, stages = (_slowest(sizes, cost, name) for name in DIMENSIONS[:3])
    shards = _slowest(sizes, cost, "data", "context")
    each_sum = collective("all_reduce", hidden_bytes, sums)
    sent: dict[str, _Sent] = {
        "tensor": [(4 * layers * micro_batches, *each_sum, 0.0)],
        "context": [],
        "pipeline": [],
        "data": [
            (1, *collective("all_gather", parameters * _WORKING_BYTES, shards), forward_s),
            (1, *collective("reduce_scatter", parameters * _GRADIENT_BYTES, shards), backward_s),
        ],
    }
    if context > 1:
        pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
        numbers = 2 * tokens * model.key_value_width / tensor  # keys and values
        # The time for a rank's computation with one rank's keys and values, in one layer.
        block_s = attention_flop / context**2 / flop_per_s
        forward = message(numbers * _WORKING_BYTES, pairs)
        backward = message(numbers * (_WORKING_BYTES + _GRADIENT_BYTES), pairs)
        times = layers * micro_batches
        # Backward takes one more send, to bring the gradients back to their own ranks.
        sent["context"] = [
            (times * (context - 1), *forward, block_s),
            (times * context, *backward, 2 * block_s),
        ]
    if pipeline > 1:
        exposed = 2 * (pipeline - 1)  # the messages that fill and drain the pipeline
        each = message(hidden_bytes, itertools.pairwise(stages))
        behind = max(2 * micro_batches - exposed, 0)
        sent["pipeline"] = [(exposed, *each, 0.0), (behind, *each, forward_s)]

    ranks = {"tensor": sums, "context": ring, "pipeline": stages, "data": shards}
    traffic = {name: _traffic(name, ranks[name], cost, sent[name]) for name in sizes}
    if pipeline > 1:
        # For every GPU except those at the ends, even if there are too few micro-batches to fill
        # the pipeline.
        sent_bytes = 2 * micro_batches * hidden_bytes
        traffic["pipeline"] = replace(traffic["pipeline"], sent_bytes=sent_bytes)
    compute_s = micro_batches * (forward_s + backward_s)
    exposed_s = traffic["tensor"].exposed_s + traffic["context"].exposed_s
    return MeshStep(
        tuple(traffic.values()),
        compute_s,
        (pipeline - 1) * (compute_s + exposed_s) / micro_batches,
        parameters * (_WORKING_BYTES + _GRADIENT_BYTES + _ADAM_BYTES / len(shards)),
    )


def _slowest(sizes: Mapping[str, int], cost: CostModel, *dimensions: str) -> list[int]:
    """Return the group that the others wait for, or the first if all are equally slow.

    The host with the fewest of a group's GPUs has the fewest adapters for the group, and slows down
    its ring; a group within one host is the fastest. Otherwise, more hosts mean more steps.
    """

    def slowness(group: list[int]) -> tuple[int, int, int]:
        placed = placement(group, cost.gpus_per_host)
        return -placed[0], len(placed), placed[-1]

    return max(groups(sizes, *dimensions), key=slowness)


def _traffic(dimension: str, ranks: list[int], cost: CostModel, sent: _Sent) -> Traffic:
    return Traffic(
        dimension,
        tuple(ranks),
        cost.link_name(ranks) if len(ranks) > 1 else "none",
        sent_bytes=sum(times * size_bytes for times, size_bytes, _, _ in sent),
        sending_s=sum(times * each_s for times, _, each_s, _ in sent),
        exposed_s=sum(times * max(each_s - beside_s, 0) for times, _, each_s, beside_s in sent),
    )


def _check_mesh(sizes: Mapping[str, int], model: TransformerSizes, sequences: int) -> None:
    if sorted(sizes) != sorted(DIMENSIONS) or min(sizes.values()) < 1:
        raise ValueError(
            f"sizes must have {', '.join(DIMENSIONS)}, each at least 1; got {dict(sizes)}"
        )
    check_count("sequences", sequences)
    model.reject_experts_and_latent("a step on a mesh")
    divided = {
        "tensor": (model.key_value_heads, "key-value heads"),
        "context": (model.sequence, "tokens per sequence"),
        "pipeline": (model.layers, "layers"),
        "data": (sequences, "sequences"),
    }
    for name, (count, what) in divided.items():
        if count % sizes[name]:
            raise ValueError(f"{count} {what} aren't divisible by {name} = {sizes[name]}")


# The time lost to failures and checkpoints, by formula and by simulation
#
# If any GPU fails, all of them stop. The run then restarts, and repeats everything since its last
# checkpoint. Failures occur at a constant rate (an exponential distribution), even while a
# checkpoint is being written or a restart is in progress.
#
# Not modeled: asynchronous checkpoints, and GPUs that slow down or compute wrong results instead of
# failing.

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


def simulated_goodput(
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
    return goodput_with_failures_at(training_s, interval_s, checkpoint_s, restart_s, failures_s)


def goodput_with_failures_at(
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
