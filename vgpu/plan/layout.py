"""How a transformer is divided over ranks: degrees of parallelism, and PyTorch's code for each.

The degrees have torchtitan's names: ``pp``, ``dp_replicate``, ``dp_shard``, ``cp`` and ``tp``. The
same lines apply FSDP2, tensor and context parallelism and recomputation to real ranks, under
``launch.run`` or torchrun, and to a rank of ``vgpu.cluster``.
"""

import dataclasses
import functools
import gc
import math
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tqdm.auto import tqdm

from vgpu.plan.experts import Experts
from vgpu.plan.float8 import LastCast, gather_input, scatter_output, use_float8
from vgpu.plan.recomputation import recomputed
from vgpu.plan.transformer import Transformer, TransformerBlock, TransformerSizes, check_count

RECOMPUTE = ("none", "selective", "full")
"""What backward recomputes in a block: nothing, everything but attention and every second matrix
product (torchtitan's "selective op"), or everything (activation checkpointing).
"""

REDUCE = ("float32", "bfloat16")
"""The dtypes in which gradients can be reduced across ranks."""

SHOW_AFTER_S = 2.0
"""A prediction that takes longer shows a progress bar."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of ranks.

    The ranks of ``tp``, which communicate most often, are neighbors; then come ``cp``,
    ``dp_shard``, ``dp_replicate`` and ``pp``.
    """

    dp_replicate: int = 1
    """Groups of ranks that hold the same parameters and compute on different samples."""
    dp_shard: int = 1
    """Ranks among which FSDP2 shards parameters, gradients and optimizer state."""
    tp: int = 1
    """Ranks that compute each layer together (tensor and sequence parallelism)."""
    pp: int = 1
    """Pipeline stages: groups of ranks, each with consecutive layers."""
    cp: int = 1
    """Ranks that share each sequence (context parallelism); FSDP2 shards among them, too."""
    ep: int = 1
    """Neighboring ranks of ``dp_shard`` and ``cp`` that hold different experts; adds no ranks."""

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            check_count(name, degree)
        if self.shards % self.ep:
            raise ValueError(
                f"{self.ep} ranks with different experts (ep) must divide the {self.shards} ranks of "
                f"dp_shard and cp"
            )
        if self.ep > 1 and self.tp > 1:
            raise ValueError(
                "experts aren't supported with tensor parallelism: give ep or tp, not both"
            )

    @property
    def ranks(self) -> int:
        return self.ranks_per_stage * self.pp

    @property
    def ranks_per_stage(self) -> int:
        return self.dp_replicate * self.shards * self.tp

    @property
    def shards(self) -> int:
        """The number of ranks among which parameters are sharded: those of ``dp_shard`` and ``cp``."""
        return self.dp_shard * self.cp

    @property
    def dp(self) -> int:
        """The number of parts into which a batch is divided; ranks of ``tp`` and ``cp`` see the
        same samples.
        """
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks of the default process group, with a dimension for each degree; ``pp`` must be 1.

        ``cp`` is part of ``dp_shard``, because FSDP2 shards among both.
        """
        return self._mesh(device_type, {"dp_shard": self.shards, "tp": self.tp})

    def context_mesh(self, device_type: str) -> DeviceMesh:
        """The ranks that share sequences with this one."""
        degrees = {"dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        return self._mesh(device_type, degrees)["cp"]

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """A mesh for experts: the ranks of each part as dp_replicate and dp_shard, and those of ``ep``."""
        return self._mesh(device_type, {"dp_shard": self.shards // self.ep, "ep": self.ep})

    def _mesh(self, device_type: str, of_replica: dict[str, int]) -> DeviceMesh:
        degrees = {"dp_replicate": self.dp_replicate} | of_replica
        if self.pp > 1:
            degrees = {"pp": self.pp} | degrees
        return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))

    def __str__(self) -> str:
        """For example "dp_shard 8 × tp 8"."""
        degrees = {"pp": self.pp} | vars(self)
        shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " × ".join(shown) or "1 rank"


def check_tp(sizes: TransformerSizes, tp: int, sequence: int | None = None) -> None:
    """Raise ValueError if ``tp`` ranks can't share a layer of these sizes evenly."""
    divided = {
        "heads": sizes.heads,
        "key-value heads": sizes.key_value_heads,
        "feed-forward width": sizes.feed_forward,
        "vocabulary": sizes.vocabulary,
        "sequence": sequence or sizes.sequence,
    }
    uneven = [f"{name} {size}" for name, size in divided.items() if size % tp]
    if uneven:
        largest = math.gcd(*divided.values())
        raise ValueError(
            f"{tp} ranks can't share a layer evenly: {', '.join(uneven)}; they must be divisible by "
            f"{largest}"
        )


# Groups of ranks, and the hosts they're on


def groups(sizes: Mapping[str, int], *dimensions: str) -> list[list[int]]:
    """The groups along one dimension, or along several together, each a list of ranks.

    sizes: the size of each dimension, starting with the one whose ranks are neighbors, which is the
    last in ``DeviceMesh``.
    """
    names = list(sizes)
    strides = [
        (math.prod(sizes[name] for name in names[: names.index(dimension)]), sizes[dimension])
        for dimension in dimensions
    ]
    members: dict[int, list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        first = rank - sum(rank // stride % count * stride for stride, count in strides)
        members.setdefault(first, []).append(rank)
    return list(members.values())


def placement(ranks: Iterable[int], gpus_per_host: int) -> tuple[int, ...]:
    """How many of these ranks are on each of their hosts, fewest first; 0 per host means all on one."""
    return tuple(
        sorted(Counter(r // gpus_per_host if gpus_per_host else 0 for r in ranks).values())
    )


@functools.cache
def check_hosts(layout: Layout, gpus_per_host: int) -> None:
    """Raise ValueError if groups of one kind are placed differently on hosts.

    Some would be slower than others, and no single rank would show how long a step takes.
    """
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp_shard": layout.dp_shard}
    sizes |= {"dp_replicate": layout.dp_replicate, "pp": layout.pp}
    kinds = {name: groups(sizes, name) for name in ("tp", "cp", "dp_replicate")}
    kinds["dp_shard"] = groups(sizes, "cp", "dp_shard")
    if layout.ep > 1:
        parts = {"ep": layout.ep, "dp_shard": layout.shards // layout.ep}
        parts["others"] = layout.dp_replicate * layout.pp
        kinds["ep"] = groups(parts, "ep")
        kinds["dp_shard of experts"] = groups(parts, "dp_shard")
    for name, several in kinds.items():
        ways = sorted({placement(group, gpus_per_host) for group in several})
        if len(ways) > 1:
            raise ValueError(
                f"{layout} places groups of {name} differently: one has {ways[0]} ranks on its "
                f"hosts of {gpus_per_host} GPUs, another {ways[-1]}. Let the degrees divide "
                f"{gpus_per_host}, or be multiples of it"
            )


# Pipeline stages


class StageLayers(NamedTuple):
    """The part of a transformer that a pipeline stage has."""

    layers: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the last norm and the output."""


def split_layers(layers: int, stages: int) -> list[StageLayers]:
    """The stages of a transformer with ``layers`` layers, as torchtitan divides it.

    The embedding and the output each count as a layer, and a remainder goes to the first stages. So
    Llama 405B, whose 126 layers aren't divisible by 8, has 15 layers in the first and last of 8
    stages and 16 in the others. Raises ValueError for more stages than layers.

    Source: ``_generate_llm_fqn_per_model_part`` in torchtitan/distributed/pipeline_parallel.py; the
    version of December 2024, ``generate_split_points``, gives the same stages there.
    """
    if stages > layers:
        raise ValueError(
            f"{stages} stages of a pipeline are too many for a model of {layers} layers: at most "
            f"{layers}"
        )
    if stages == 1:
        return [StageLayers(layers, True, True)]
    each, left = divmod(layers + 2, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return [StageLayers(n, stage == 0, stage == stages - 1) for stage, n in enumerate(counts)]


class TransformerStage(nn.Module):
    """A pipeline stage of a transformer, for sequences of exactly ``sizes.sequence`` tokens.

    Input: (B, S) integers for the first stage, (B, S, width) for the others. Output: (B, S,
    vocabulary) logits from the last stage, (B, S, width) from the others. With tensor parallelism,
    S between stages is a rank's part.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: TransformerSizes, part: StageLayers) -> None:
        super().__init__()
        if sizes.experts is not None and not part.first:  # dense layers are in the first stage
            sizes = dataclasses.replace(
                sizes, experts=dataclasses.replace(sizes.experts, dense_layers=0)
            )
        whole = Transformer(dataclasses.replace(sizes, layers=part.layers))
        self.embedding = whole.embedding if part.first else None
        self.positions = whole.positions if part.first else None
        self.blocks = whole.blocks
        self.norm = whole.norm if part.last else None
        self.output = whole.output if part.last else None
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(x.size(1), device=x.device)[None])
        for block in self.blocks:
            hidden = block(hidden, self.cos, self.sin)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))


# PyTorch's own code


def apply_tp(
    model: Transformer | TransformerStage, mesh: DeviceMesh, casts: LastCast | None = None
) -> None:
    """Divide each layer among the ranks of a one-dimensional mesh, in place.

    Between the layers, each rank holds a part of every sequence (sequence parallelism, Korthikanti
    et al., 2022). The logits stay divided by vocabulary: compute the loss in ``loss_context``.
    casts: for a model in float8, so that float8 is what's gathered.
    """
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    here = {name: style for name, style in plan.items() if getattr(model, name) is not None}
    if here:  # a middle stage has only blocks
        parallelize_module(model, mesh, here)
    whole = (Replicate(), None, None)
    gathers: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=whole
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }
    summed = RowwiseParallel(output_layouts=Shard(1))
    if casts is not None:
        gathers, summed = {}, RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    block: Any
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": summed,
                "feed_forward_norm": SequenceParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": summed,
                **gathers,
                **({"feed_forward.gate": ColwiseParallel()} if block.feed_forward.gate else {}),
            },
        )
        if casts is not None:
            for part, output in (
                (block.attention, block.attention.output),
                (block.feed_forward, block.feed_forward.down),
            ):
                gather_input(part, casts)
                scatter_output(output, mesh, casts)


def loss_context(layout: Layout) -> AbstractContextManager[None]:
    """A context for the loss and its backward; with tensor parallelism, logits are never gathered."""
    return loss_parallel() if layout.tp > 1 else nullcontext()


@contextmanager
def attention_context(mesh: DeviceMesh | None) -> Iterator[None]:
    """A context for forward and backward: attention over sequences that a mesh's ranks share.

    It's PyTorch's own: each rank has a part of a sequence's start and an equal part of its end, so
    that all compute equally much; keys and values are gathered, and their gradients travel around a
    ring.
    """
    if mesh is None:
        yield
        return
    # Tensors of a sequence's length were created with a rank's part of it, so nothing is left to
    # divide.
    nothing = torch.empty(2 * mesh.size())
    with context_parallel(
        mesh, buffers=[nothing], buffer_seq_dims=[0], no_restore_buffers={nothing}
    ):
        yield


def apply_fsdp(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Apply FSDP2 to the whole model and to each of its blocks, which are gathered one after another.

    The mesh has one dimension, or two for shards inside replicas (HSDP).
    """
    policy = policy or MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class ParallelModel:
    """One virtual rank's model, or stage of one; ``module`` is wrapped by FSDP2.

    Parameters are gathered in bfloat16.
    """

    def __init__(
        self,
        model: Transformer | TransformerStage,
        layout: Layout,
        mesh: DeviceMesh,
        *,
        reduce: str = "float32",
        float8: bool = False,
        wrap_ends: bool = False,
    ) -> None:
        """model: on the host. A GPU needs room only for its own part.

        reduce: the dtype in which gradients are reduced, one of ``REDUCE``. float8: whether the
        blocks' linear layers multiply in it. wrap_ends: whether embedding and output are sharded
        separately.
        """
        casts = use_float8(model.blocks) if float8 else None
        self._layout = layout
        self._context = layout.context_mesh("vgpu") if layout.cp > 1 else None
        if layout.tp > 1:
            apply_tp(model, mesh["tp"], casts)
        self._blocks = list(model.blocks)
        if layout.ep > 1:
            experts_mesh = layout.expert_mesh("vgpu")
            for block in self._blocks:
                if isinstance(block.feed_forward, Experts):
                    block.feed_forward.divide(experts_mesh["ep"])
        self._forwards = [block.forward for block in self._blocks]
        dp = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce)
        )
        if layout.ep > 1:
            for block in self._blocks:
                if isinstance(block.feed_forward, Experts):
                    fully_shard(block.feed_forward.own, mesh=experts_mesh[dp], mp_policy=policy)
        # With thousands of shards, this takes minutes.
        blocks = progress("sharding blocks", "block", items=self._blocks)
        ends = (model.embedding, model.output) if wrap_ends else ()  # a stage may lack them
        apply_fsdp(model, [*filter(None, ends), *blocks], mesh[dp], policy)
        self.module: Any = model.to("vgpu")

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context for forward, loss and backward."""
        loss, attention = loss_context(self._layout), attention_context(self._context)
        with loss, attention, warnings.catch_warnings():
            # With tensor parallelism, the embedding returns a view; nothing changes it in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield

    def configure(
        self, recompute: str, reshard_after_forward: bool, recompute_every: int = 1
    ) -> None:
        """Set what may change from step to step: the recomputation, and FSDP2's resharding.

        recompute_every: one of every so many blocks is recomputed.
        """
        block: Any
        for index, (block, forward) in enumerate(zip(self._blocks, self._forwards, strict=True)):
            again = index % recompute_every == 0
            block.forward = recomputed(forward, recompute if again else "none")
            block.set_reshard_after_forward(reshard_after_forward, recurse=False)
            if self._layout.ep > 1 and isinstance(block.feed_forward, Experts):
                own: Any = block.feed_forward.own
                own.set_reshard_after_forward(reshard_after_forward)


def adam(module: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW, with a parameter group for each block and one for the rest.

    For each operator, DTensor inspects the whole list of tensors: for all blocks together, that
    takes seconds.
    """
    blocks = [child for child in module.modules() if isinstance(child, TransformerBlock)]
    groups = [list(block.parameters()) for block in blocks]
    inside = {id(parameter) for group in groups for parameter in group}
    groups.append([p for p in module.parameters() if id(p) not in inside])
    return torch.optim.AdamW([{"params": group} for group in groups if group], fused=True)


def adam_with_state(module: nn.Module) -> torch.optim.AdamW:
    """The module's optimizer after a first step, which creates its state."""
    optimizer = adam(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@contextmanager
def without_garbage() -> Iterator[None]:
    """Collect what the block leaves in reference cycles when it ends.

    FSDP2 replaces parameters, and the old ones' bytes would be freed in the middle of some later
    step. With automatic collection off, all new objects are in the youngest generation, which is
    quick to collect, whereas a full collection goes through all of torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()


def progress(what: str, unit: str, total: int | None = None, items: Any = None) -> Any:
    """A progress bar, shown if it takes long; if several processes predict, only their parent has one.

    total: the number of updates, or the items to iterate over.
    """
    child = multiprocessing.parent_process() is not None
    options = {"unit": unit, "leave": False, "delay": SHOW_AFTER_S, "disable": child}
    return tqdm(items, what, total, **options)
