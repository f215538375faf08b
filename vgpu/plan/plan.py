"""A plan for a training run on a cluster, and the time and memory that one of its ranks takes.

A rank's step is recorded with all of its layers or, much faster, extrapolated from a few.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

import vgpu
from vgpu.plan import estimate, schedules
from vgpu.plan.layout import RECOMPUTE, REDUCE, Layout, check_hosts, check_tp, split_layers
from vgpu.plan.parallel_model import ParallelModel, adam, adam_with_state, without_garbage
from vgpu.plan.transformer import Transformer, TransformerSizes
from vgpu.profiling.peaks import OTHER, PeakByCause
from vgpu.time.costs import check_count
from vgpu.time.timeline import union_s
from vgpu.units import format_bytes

MOST_RANKS = 32_768
"""The limit for a plan: planning takes longer with more ranks, as FSDP2 creates more shards."""

MOST_LAYERS = 1024
MOST_MICRO_BATCHES = 4096
"""The limit for a pipeline: more would only repeat the pattern, and take longer to simulate."""

_NO_LIMIT_BYTES = 2**50  # a plan that doesn't fit is still counted
_MOST_BYTES = 2**45  # according to the estimate, which leaves out a lot


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transformer, a cluster, and how the transformer is divided across the cluster."""

    sizes: TransformerSizes
    layout: Layout
    batch: int = 1
    """Sequences per step on each data-parallel rank; ``tp`` and ``cp`` ranks share them."""
    sequence: int = dataclasses.field(default=None)  # type: ignore[assignment]
    """Tokens per sequence, by default the model's; a larger number extends the model."""
    recompute: str = "none"
    """What the backward pass recomputes in each block: one of ``RECOMPUTE``."""
    reshard_after_forward: bool = True
    gpu: str | vgpu.GPUSpec = "H100"
    gpus_per_host: int = 8
    network: str = "InfiniBand NDR"
    chunks: int = 1
    """Pipeline stages per rank: 1 for 1F1B, more for interleaved 1F1B."""
    micro_batches: int | None = None
    """Micro-batches into which a pipeline divides ``batch``; None: ``pp``, as in torchtitan."""
    accumulate: int = 1
    """How many times a step without a pipeline runs ``batch`` sequences."""
    sync_once: bool = False
    """Whether gradients are reduced only after the last of ``accumulate`` batches, and parameters
    stay gathered after earlier backward passes (FSDP2's ``set_requires_gradient_sync`` and
    ``set_reshard_after_backward``). Until then, each rank holds unsharded gradients. Without
    ``reshard_after_forward``, parameters are gathered only once, as in ZeRO-1. A pipeline always
    does this.
    """
    reduce: str = "float32"
    """The dtype in which gradients are reduced: one of ``REDUCE``."""
    recompute_every: int = 1
    """One of every ``recompute_every`` blocks follows ``recompute``; the others keep everything."""
    float8: bool = False
    """Whether the blocks' linear layers use float8 matmuls (``vgpu.plan.parallel_model``)."""
    wrap_ends: bool = False
    """Whether FSDP2 wraps the embedding and output separately, so less is reduced at the end."""

    def __post_init__(self) -> None:
        if self.sequence is None:
            object.__setattr__(self, "sequence", self.sizes.sequence)
        counts = ("batch", "sequence", "gpus_per_host", "chunks", "micro_batches", "accumulate")
        for name in (*counts, "recompute_every"):
            value = getattr(self, name)
            if value is not None or name != "micro_batches":
                check_count(name, value)
        self.sizes.check()
        if self.recompute not in RECOMPUTE:
            raise ValueError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}"
            )
        if self.reduce not in REDUCE:
            raise ValueError(f"reduce must be one of {', '.join(REDUCE)}, got {self.reduce!r}")
        ranks, each = self.layout.ranks, self.gpus_per_host
        if ranks > MOST_RANKS:
            raise ValueError(
                f"{ranks:,} ranks ({self.layout}) are too many: a plan can have at most "
                f"{MOST_RANKS:,}"
            )
        if self.sizes.layers > MOST_LAYERS:
            raise ValueError(
                f"{self.sizes.layers:,} layers are too many: a plan can have at most "
                f"{MOST_LAYERS:,}, since all layers are identical"
            )
        if ranks > each and ranks % each:
            raise ValueError(
                f"{ranks} ranks ({self.layout}) don't fill hosts of {each} GPUs: use a multiple of "
                f"{each}"
            )
        check_hosts(self.layout, each)
        self._check_experts()
        self._check_sequence()
        self._check_pipeline()
        self._check_bytes()
        if self.float8 and self.spec.fp8_flop_per_s is None:
            raise ValueError(
                f"{self.spec.name} can't multiply float8 tensors; these presets can: "
                f"{', '.join(name for name, gpu in vgpu.PRESETS.items() if gpu.fp8_flop_per_s)}"
            )

    def _check_experts(self) -> None:
        experts, layout = self.sizes.experts, self.layout
        if experts is None:
            if layout.ep > 1:
                raise ValueError(f"ep = {layout.ep} needs experts: pass sizes with experts")
            return
        experts.check_division(layout.ep)
        if layout.ep > 1 and self.recompute == "selective":
            # FSDP2's hooks on the experts would run inside the checkpoint, and a different number
            # of times in the backward pass.
            raise ValueError("selective recomputation isn't supported with ep: use none or full")
        if layout.tp > 1:
            raise ValueError(
                "experts aren't supported with tensor parallelism: use ep instead of tp"
            )
        if layout.pp > 1:
            first = split_layers(self.sizes.layers, layout.pp * self.chunks)[0].layers
            if experts.dense_layers > first:
                raise ValueError(
                    f"{experts.dense_layers} dense layers don't fit in the first stage, which has "
                    f"{first} layers"
                )

    def _check_sequence(self) -> None:
        parts = 2 * self.layout.cp
        if self.layout.cp > 1 and self.sequence % parts:
            raise ValueError(
                f"{self.layout.cp} ranks can't share a sequence of {self.sequence:,} tokens "
                "evenly: each takes a chunk from the first half and one from the second, so the "
                f"number of tokens must be a multiple of {parts}"
            )
        check_tp(self.sizes, self.layout.tp, self.tokens_per_sequence)

    def _check_pipeline(self) -> None:
        if self.layout.pp == 1:
            if self.chunks > 1 or (self.micro_batches or 1) > 1:
                raise ValueError(
                    f"chunks ({self.chunks}) and micro_batches ({self.micro_batches}) are for "
                    "pipelines: set the layout's pp to at least 2"
                )
            return
        if self.accumulate > 1:
            raise ValueError(
                f"accumulate ({self.accumulate}) is for plans without a pipeline: a pipeline "
                "divides batch into micro_batches"
            )
        split_layers(self.sizes.layers, self.layout.pp * self.chunks)
        count = self.micro_batches or self.layout.pp
        if count > MOST_MICRO_BATCHES:
            raise ValueError(
                f"{count:,} micro-batches are too many: a plan can have at most "
                f"{MOST_MICRO_BATCHES:,}"
            )
        if self.batch % count:
            raise ValueError(
                f"a batch of {self.batch} can't be divided evenly into {count} micro-batches: use "
                f"a multiple of {count}, or change micro_batches"
            )
        self.schedule_of(count)  # raises ValueError for a count that can't be interleaved

    def _check_bytes(self) -> None:
        """Raise ValueError for a plan with more bytes than can be counted."""
        least_bytes = estimate.least_bytes(
            self.sizes,
            self.micro_batch * self.tokens_per_sequence,
            self.layout.shards,
            self.layout.tp * self.layout.pp,
            self.recompute,
            ep=self.layout.ep,
        )
        if least_bytes > _MOST_BYTES:
            raise ValueError(
                f"{self.micro_batch:,} sequences of {self.sequence:,} tokens at once take at least "
                f"{format_bytes(least_bytes)} on each GPU, which has "
                f"{format_bytes(self.spec.memory_bytes)}: use a smaller batch or shorter sequences"
            )

    @property
    def schedule(self) -> schedules.Schedule:
        """The order in which the ranks of a pipeline process micro-batches."""
        return self.schedule_of(self.micro_batches or self.layout.pp)

    def schedule_of(self, micro_batches: int) -> schedules.Schedule:
        """Return the plan's schedule for a different number of micro-batches."""
        if self.chunks == 1:
            return schedules.one_forward_one_backward(self.layout.pp, micro_batches)
        return schedules.interleaved(self.layout.pp, micro_batches, self.chunks)

    @property
    def micro_batch(self) -> int:
        """Sequences that a rank processes at once."""
        if self.layout.pp == 1:
            return self.batch
        return self.batch // (self.micro_batches or self.layout.pp)

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens of each sequence on one ``cp`` rank; ``tp`` ranks share them."""
        return self.sequence // self.layout.cp

    @property
    def spec(self) -> vgpu.GPUSpec:
        return vgpu.get_spec(self.gpu)

    @property
    def hosts(self) -> int:
        return max(1, self.layout.ranks // self.gpus_per_host)

    def taking(self, costs: dict[str, Any]) -> tuple["Plan", dict[str, Any]]:
        """Return the plan with any ``gpu`` and ``network`` in ``costs``, and the other costs."""
        own = {name: costs[name] for name in ("gpu", "network") if name in costs}
        others = {name: cost for name, cost in costs.items() if name not in own}
        return dataclasses.replace(self, **own) if own else self, others

    @property
    def tokens(self) -> int:
        """Tokens per step, across all ranks."""
        return self.batch * self.accumulate * self.sequence * self.layout.dp


@contextmanager
def on_cluster(plan: Plan, rank: int = 0) -> Iterator[vgpu.Cluster]:
    """In the block, make this process a rank of the plan's cluster; tensors have no values."""
    cluster = vgpu.cluster(
        plan.hosts,
        min(plan.gpus_per_host, plan.layout.ranks),
        gpu=plan.spec,
        network=plan.network,
        rank=rank,
        memory_bytes=_NO_LIMIT_BYTES,
    )
    with cluster as entered, vgpu.shapes_only():
        yield entered


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One rank's recorded step: virtual time and counted bytes."""

    plan: Plan
    timeline: vgpu.Timeline
    bytes_by_cause: dict[str, int]
    """Bytes allocated at the peak, as counted by ``vgpu.profiling.peaks``."""

    @property
    def allocated_bytes(self) -> int:
        """The peak of the bytes that tensors take."""
        return sum(self.bytes_by_cause.values())

    @property
    def seconds(self) -> float:
        more_s = 0.0
        if self._unrecorded:
            start_s, end_s = second_micro_batch(self.timeline)
            more_s = self._unrecorded * (end_s - start_s)
        return self.timeline.makespan_s + more_s

    @property
    def _unrecorded(self) -> int:
        """The number of micro-batches that weren't recorded, if gradients are accumulated."""
        return self.plan.accumulate - recorded_micro_batches(self.plan)

    @property
    def tokens_per_s(self) -> float:
        """The tokens/s per GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds

    @property
    def utilization(self) -> float:
        """The model's FLOP/s, without recomputation, as a fraction of the datasheet's peak."""
        flop = estimate.flop_per_token(self.plan.sizes, self.plan.sequence) * self.tokens_per_s
        return flop / self.plan.spec.tensor_flop_per_s

    @property
    def time_by_cause(self) -> dict[str, float]:
        """The step's seconds: computing, each exposed collective, and the rest."""
        device = self.timeline.devices[0]
        causes = time_by_cause(self.timeline, device)
        if self._unrecorded:
            of_one = time_by_cause(self.timeline, device, second_micro_batch(self.timeline))
            causes = {name: s + self._unrecorded * of_one[name] for name, s in causes.items()}
        return causes


@dataclasses.dataclass(frozen=True)
class Step(RecordedStep):
    """One rank's recorded step, including what the allocator reserves."""

    reserved_bytes: int
    """The peak memory that PyTorch's allocator reserves on the GPU."""

    def replayed(self, **changes: Any) -> "Step":
        """Time the same operations again with different costs, as ``vgpu.replay`` does.

        ``changes`` are fields of ``vgpu.CostModel``, and the plan's ``gpu`` and ``network``. Bytes
        don't change.
        """
        timeline = vgpu.replay(self.timeline, **changes)
        plan, _ = self.plan.taking(changes)
        return dataclasses.replace(self, plan=plan, timeline=timeline)

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.plan.spec.memory_bytes


_RECORDED = {False: 2, True: 3}
"""Micro-batches recorded without and with ``sync_once``, in which the last one differs, too."""


def recorded_micro_batches(plan: Plan) -> int:
    """Return how many micro-batches are recorded; the rest take as long as the second."""
    return min(plan.accumulate, _RECORDED[plan.sync_once])


def second_micro_batch(timeline: vgpu.Timeline) -> tuple[float, float]:
    """Return when the second of several micro-batches starts and ends, in seconds.

    It starts at the end of the first backward pass, and ends with its own.
    """
    computed = [event for event in timeline.events if event.kind == "kernel" and event.stream == 0]
    computed.sort(key=lambda event: event.start_s)
    ends = [
        event.end_s
        for event, following in itertools.pairwise(computed)
        if event.backward and not following.backward
    ]
    start_s, end_s, *_ = ends
    return start_s, end_s


def time_by_cause(
    timeline: vgpu.Timeline,
    device: torch.device,
    window: tuple[float, float] | None = None,
    idle_s: float | None = None,
) -> dict[str, float]:
    """Return where a device's seconds go, from the window's start to its end.

    The window is the whole timeline by default. In a pipeline, the device waits ``idle_s`` for
    other stages.
    """
    start_s, end_s = window or (0.0, timeline.makespan_s)
    intervals = defaultdict(list)
    for event in timeline.of(device):
        if event.kind in ("kernel", "collective"):
            cause = "computing" if event.kind == "kernel" else f"waiting for {event.name}"
            from_s = max(event.start_s, start_s)
            intervals[cause].append((from_s, max(from_s, min(event.end_s, end_s))))
    causes, seen, known_s = {}, [], 0.0
    for cause in sorted(intervals):  # "computing" comes first
        seen += intervals[cause]
        now_s = union_s(seen)
        causes[cause] = now_s - known_s
        known_s = now_s
    if idle_s is not None:
        causes["waiting for other stages"] = idle_s
    causes["waiting for the host"] = end_s - start_s - known_s - (idle_s or 0.0)
    return causes


# Training one rank: PyTorch's own parallel code, on shapes


class Rank:
    """A rank's model and optimizer, shared by plans whose steps differ.

    Batch, recomputation and ``reshard_after_forward`` may change from step to step.
    """

    @without_garbage()
    def __init__(self, plan: Plan, takes_a_step: bool = True, compiled: bool = False) -> None:
        """With ``takes_a_step``, the rank takes a training step before the recorded one.

        Otherwise, it only creates the optimizer's state. The recorded step then has the same time
        and allocated bytes, but slightly different reserved bytes, which depend on everything that
        happened before. ``compiled`` blocks save less for their backward pass.
        """
        self._layout, self._compiled = plan.layout, compiled
        whole = Transformer(dataclasses.replace(plan.sizes, sequence=plan.tokens_per_sequence))
        self._parallel = ParallelModel(whole, plan, plan.layout.mesh("vgpu"))
        self.model = self._parallel.module
        if takes_a_step:
            self.optimizer = adam(self.model)
            self.train(plan)
        else:
            self.optimizer = adam_with_state(self.model)

    def train(self, plan: Plan) -> None:
        """Run one step."""
        assert plan.layout == self._layout
        self._parallel.configure(plan, self._compiled)
        size = (plan.batch, plan.tokens_per_sequence)
        count = recorded_micro_batches(plan)
        for micro_batch in range(count):
            syncs = micro_batch == count - 1 or not plan.sync_once
            self.model.set_requires_gradient_sync(syncs)
            self.model.set_reshard_after_backward(syncs)
            tokens = torch.randint(plan.sizes.vocabulary, size, device="vgpu")
            with self._parallel.training():
                # No variable holds the logits, so only the loss keeps them during backward.
                loss = F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())
                loss.backward()
                del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded(self, plan: Plan, **costs: Any) -> RecordedStep:
        """Record a step and its bytes at the peak; other ``Rank`` objects' bytes don't count."""
        with PeakByCause(self.model, self.optimizer) as peak, vgpu.record(**costs) as timeline:
            self.train(plan)
        assert not timeline.races, timeline.races
        own = {cause: size for cause, size in peak.by_cause.items() if cause != OTHER}
        return RecordedStep(plan, timeline, own)


# A step extrapolated from recordings with a few layers

RECORDED_LAYERS = (4, 5)
"""The layer counts that ``extrapolate`` records, which differ by one layer. With fewer than four
layers, memory peaks at a different point of the step.
"""


def extrapolated(
    layers: int, few: float, more: float, *, counts: tuple[int, int] = RECORDED_LAYERS
) -> float:
    """Extrapolate linearly from models with ``counts`` layers to one with ``layers`` layers."""
    return more + (layers - counts[1]) * (more - few) / (counts[1] - counts[0])


def few_layers(plan: Plan) -> tuple[int, int]:
    """Return ``RECORDED_LAYERS``, or two multiples of ``recompute_every``."""
    every = plan.recompute_every
    if every == 1:
        return RECORDED_LAYERS
    few = every * math.ceil(RECORDED_LAYERS[0] / every)
    return few, few + every


def with_layers(plan: Plan, layers: int) -> Plan:
    """Return the plan for a model with ``layers`` layers."""
    return dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=layers))


@dataclasses.dataclass(frozen=True)
class ExtrapolatedStep:
    """A plan's step, extrapolated from a few layers; much faster than predicting all of them.

    All layers of a transformer are identical, so time and allocated bytes match the full model's to
    within a few tenths of a percent. Reserved memory isn't included, because it grows in jumps.
    """

    plan: Plan
    steps: tuple[RecordedStep, RecordedStep]

    def seconds(self, **costs: Any) -> float:
        """Return the full model's seconds per step; ``costs`` override the recorded ones, as in
        ``vgpu.replay``.
        """
        few = [
            dataclasses.replace(step, timeline=vgpu.replay(step.timeline, **costs))
            if costs
            else step
            for step in self.steps
        ]
        counts = few_layers(self.plan)
        return extrapolated(self.plan.sizes.layers, *(step.seconds for step in few), counts=counts)

    def tokens_per_s(self, **costs: Any) -> float:
        """Return the tokens/s per GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds(**costs)

    @property
    def bytes_by_cause(self) -> dict[str, float]:
        """Like ``Step.bytes_by_cause``; the sum is the bytes allocated at the peak."""
        return self._by_cause(*(step.bytes_by_cause for step in self.steps))

    @property
    def time_by_cause(self) -> dict[str, float]:
        return self._by_cause(*(step.time_by_cause for step in self.steps))

    def _by_cause(self, few: dict[str, Any], more: dict[str, Any]) -> dict[str, float]:
        layers = self.plan.sizes.layers
        counts = few_layers(self.plan)
        return {
            name: extrapolated(layers, few.get(name, 0.0), more.get(name, 0.0), counts=counts)
            for name in more | few
        }


def extrapolate(plan: Plan, **costs: Any) -> ExtrapolatedStep:
    """Extrapolate the plan's step from two recordings with a few layers.

    ``costs`` are as for ``predict``. Raises ValueError for a pipeline, and for a model with fewer
    layers than are recorded.
    """
    if plan.layout.pp > 1:
        # One more layer would only make one stage longer; in the full model, all are longer.
        raise ValueError(
            f"a plan with pp = {plan.layout.pp} can't be extrapolated from a few layers, because "
            "they wouldn't be split into stages the same way: use predict()"
        )
    counts = few_layers(plan)
    if plan.sizes.layers < counts[1]:
        raise ValueError(
            f"a model with {plan.sizes.layers} layers is small enough for predict(); extrapolate() "
            f"records {counts[0]} and {counts[1]} layers"
        )
    plan, costs = plan.taking(costs)
    with on_cluster(plan):
        few, more = (
            Rank(small, takes_a_step=False, compiled=bool(costs.get("fuses"))).recorded(
                small, **costs
            )
            for small in (with_layers(plan, layers) for layers in counts)
        )
    return ExtrapolatedStep(plan, (few, more))
