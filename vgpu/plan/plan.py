"""A plan for a training run on a cluster: what is trained, on which GPUs, and how it is divided."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vgpu
from vgpu.plan import schedules
from vgpu.plan.layout import RECOMPUTE, REDUCE, Layout, check_hosts, check_tp, split_layers
from vgpu.plan.transformer import TransformerSizes
from vgpu.time.costs import check_count
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
    """Whether the blocks' linear layers use float8 matmuls (``vgpu.plan.float8``)."""
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
        least_bytes = self.least_bytes()
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
    def least_state_bytes(self) -> int:
        """The bytes of a rank's parameters and of Adam's two moments, in float32."""
        layout = self.layout
        return 12 * self.sizes.parameters // (layout.shards * layout.tp * layout.pp)

    def least_bytes(self, compiled: bool = False) -> int:
        """Return the minimum number of bytes that a rank holds when its backward pass starts.

        The rank holds its state, what its blocks keep, and its part of three float32 tensors the
        size of the logits: their log-softmax, its gradient, and the logits' gradient. It also holds
        parameters gathered in bfloat16: those of all blocks without ``reshard_after_forward``, and
        those of the embedding and output without ``wrap_ends``. ``compiled`` blocks keep less.
        """
        sizes, layout = self.sizes, self.layout
        kept_bytes = sizes.layers * self.least_kept_bytes(compiled)
        logits_bytes = 12 * self.micro_batch * self.tokens_per_sequence * sizes.vocabulary
        gathered = 0 if self.wrap_ends else sizes.parameters - sizes.blocks_parameters
        if not self.reshard_after_forward:
            gathered += sizes.blocks_parameters
            gathered -= sizes.expert_products * (layout.ep - 1) // layout.ep
        shared_bytes = (logits_bytes + 2 * gathered) // layout.tp
        return self.least_state_bytes + (kept_bytes + shared_bytes) // layout.pp

    def least_kept_bytes(self, compiled: bool = False) -> int:
        """Return the minimum number of bytes that a rank keeps of a block for its backward pass.

        A block keeps its input, in bfloat16. With selective recomputation, it also keeps the
        outputs of attention and of every second matmul, but not the routed experts' inner values,
        nor what a ``compiled`` block doesn't need. Without recomputation, it keeps what its norms,
        matmuls, activation functions and attention need, apart from the narrow norms of latent
        attention. Each ``tp`` rank keeps a part of most tensors, but all of those that the ranks
        have gathered or have yet to reduce.
        """
        sizes, tp, is_llama = self.sizes, self.layout.tp, self.sizes.form == "llama"
        width, narrow, latent = sizes.width, sizes.key_value_width, sizes.latent
        shared, entire = float(width), 0.0  # numbers per token, of all tp ranks and of each
        if self.recompute == "selective":
            of_matmuls = sizes.query_width + narrow  # queries and values
            if latent is not None:
                of_matmuls = latent.query_rank + latent.key_value_rank + latent.rotary_width + width
            shared += of_matmuls + sizes.attended_width + sizes.least_inside(routed=False)
            if tp > 1:  # what is reduced and scattered after attention and after the MLP
                shared += width if compiled else 2 * width
            if is_llama and latent is None and sizes.experts is None and not compiled:
                entire = width  # the seventh matmul's output, before it's reduced
        elif self.recompute == "none":
            of_input = 0.5 if self.float8 else 1.0  # a matmul's input, in bfloat16's two bytes
            # RMSNorm keeps its input in float32, before and after dividing it. SwiGLU keeps four
            # inner tensors, GELU two; the last is a matmul's input.
            norms = 2 * width * (4 if is_llama else 1)
            inside = ((3 if is_llama else 1) + of_input) * sizes.least_inside()
            keys = narrow if latent is None else sizes.query_width
            shared = norms + sizes.query_width + keys + narrow + sizes.attended_width + inside
            entire = 2 * of_input * width  # the inputs of attention and of the MLP
        tokens = self.micro_batch * self.tokens_per_sequence
        return int(2 * tokens * (shared / tp + entire))

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
