"""One step of a training on a cluster that does not exist: its time, its bytes, its tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from helpers import vgpu
from helpers.models import Transformer, TransformerSizes
from helpers.parallel import Layout, check_tensors, loss_context, shard, share_tensors
from helpers.plan.napkin import flop_per_token
from helpers.vgpu.timing.trace import covered_s

CHECKPOINTS = ("none", "selective", "full")
"""What of a block is computed again in backward: nothing, all but attention and every second matrix
product (torchtitan's "selective op"), or everything."""

_NO_LIMIT_BYTES = 2**50  # a plan that does not fit is still counted


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transformer of some sizes, a cluster, and how one is spread over the other."""

    sizes: TransformerSizes
    layout: Layout
    batch: int = 1
    """Sequences a step on each rank; ranks that share tensors compute on the same ones."""
    sequence: int = 8192
    checkpoint: str = "none"
    reshard_after_forward: bool = True
    gpu: str | vgpu.GPUSpec = "H100"
    gpus_per_host: int = 8
    network: str = "InfiniBand NDR"

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "gpus_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {self.checkpoint!r}"
            )
        ranks, each = self.layout.ranks, self.gpus_per_host
        if ranks > each and ranks % each:
            raise ValueError(
                f"{ranks} ranks ({self.layout}) do not fill hosts of {each} GPUs; make it a "
                f"multiple of {each}"
            )
        check_tensors(self.sizes, self.layout.tensors, self.sequence)

    @property
    def spec(self) -> vgpu.GPUSpec:
        return vgpu.get_spec(self.gpu)

    @property
    def hosts(self) -> int:
        return max(1, self.layout.ranks // self.gpus_per_host)

    @property
    def tokens(self) -> int:
        """Tokens a step, on all ranks together."""
        return self.batch * self.sequence * self.layout.batches


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step of rank 0 takes: virtual time and counted bytes."""

    plan: Plan
    timeline: vgpu.Timeline
    allocated_bytes: int
    """The most that tensors take at once."""
    reserved_bytes: int
    """The most that PyTorch's allocator takes from the GPU for them."""
    state_bytes: dict[str, int]
    """Parameters and optimizer state, which stay on this rank from step to step."""

    @property
    def seconds(self) -> float:
        return self.timeline.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds

    @property
    def utilisation(self) -> float:
        """The model's FLOPs, and nothing computed again, over what the datasheet's GPU could do."""
        flop = flop_per_token(self.plan.sizes, self.plan.sequence) * self.tokens_per_s
        return flop / self.plan.spec.tensor_flop_per_s

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.plan.spec.memory_bytes

    @property
    def bytes_by_cause(self) -> dict[str, int]:
        """What is allocated at the peak: what stays on this rank, and what comes and goes."""
        passing = self.allocated_bytes - sum(self.state_bytes.values())
        return {**self.state_bytes, "gradients, gathered parameters, activations": passing}

    @property
    def time_by_cause(self) -> dict[str, float]:
        """Seconds of the step: computing, each collective that nothing hides, and the rest."""
        kernels = [event for event in self.timeline.events if event.kind == "kernel"]
        sent = [event for event in self.timeline.events if event.kind == "collective"]
        causes = {"computing": covered_s(kernels)}
        seen, known_s = list(kernels), causes["computing"]
        for name in sorted({event.name for event in sent}):
            seen += [event for event in sent if event.name == name]
            now_s = covered_s(seen)
            causes[f"waiting for {name}"] = now_s - known_s
            known_s = now_s
        causes["waiting for the host"] = self.seconds - known_s
        return causes


def predict(plan: Plan, **costs: Any) -> Step:
    """The second step of rank 0, whose GPU computes nothing and counts everything.

    bfloat16 parameters and gradients with float32 master copies and reduction, AdamW fused. costs:
    as for ``vgpu.record`` (``arithmetic_share``, ``fuses`` and others).
    """
    with (
        vgpu.cluster(
            plan.hosts,
            min(plan.gpus_per_host, plan.layout.ranks),
            gpu=plan.spec,
            network=plan.network,
            memory_bytes=_NO_LIMIT_BYTES,
        ) as cluster,
        vgpu.shapes_only(),
        vgpu.record_memory() as memory,
    ):
        step, model, optimizer = _training(plan)
        step()
        kept = {
            "parameters": _bytes(model.parameters()),
            "optimizer state": _bytes(
                value for state in optimizer.state.values() for value in state.values()
            ),
        }
        torch.get_device_module("vgpu").reset_peak_memory_stats()
        with vgpu.record(**costs) as timeline:
            step()
        assert not timeline.races, timeline.races
        return Step(
            plan,
            timeline,
            torch.get_device_module("vgpu").max_memory_allocated(),
            memory.reserved(cluster.device, expandable_segments=True).peak_reserved_bytes,
            kept,
        )


def _training(plan: Plan) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """A step of the plan's training, its model and its optimizer, on this rank."""
    layout = plan.layout
    mesh = layout.mesh("vgpu")
    # Made on the host: of the whole model a GPU need not have room for more than its own part.
    model = Transformer(dataclasses.replace(plan.sizes, sequence=plan.sequence))
    if layout.tensors > 1:
        share_tensors(model, mesh["tensors"])
    for block in model.blocks:
        _checkpointed(block, plan.checkpoint)
    copies = ("replicas", "shards") if layout.replicas > 1 else ("shards",)
    shard(
        model,
        list(model.blocks),
        mesh[copies],
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        plan.reshard_after_forward,
    )
    model.to("vgpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        size = (plan.batch, plan.sequence)
        tokens = torch.randint(plan.sizes.vocabulary, size, device="vgpu")
        with loss_context(layout):
            # Nothing but the loss holds the logits during the backward pass.
            F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def _bytes(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local if isinstance(t, torch.Tensor))


def _checkpointed(block: nn.Module, how: str) -> None:
    if how == "none":
        return
    options = {"context_fn": _keep_every_second_product} if how == "selective" else {}
    forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    block.forward = forward  # type: ignore[method-assign]


def _keep_every_second_product() -> Any:
    """torchtitan's selective checkpoints: what to keep of a block, besides its input."""
    products = {False: 0, True: 0}
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = func in kept
        if func is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
