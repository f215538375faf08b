"""Divides a transformer or a pipeline stage across ranks, using PyTorch's own parallel code.

The same code applies FSDP2, tensor and context parallelism, and recomputation on real ranks, under
``launch.run`` or torchrun, and on a rank of ``vgpu.cluster``.
"""

import dataclasses
import functools
import gc
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from tqdm.auto import tqdm

from vgpu.plan.experts import Experts
from vgpu.plan.float8 import LastCast, gather_input, scatter_output, use_float8
from vgpu.plan.layout import Layout, StageLayers
from vgpu.plan.plan import Plan
from vgpu.plan.transformer import Transformer, TransformerBlock, TransformerSizes
from vgpu.time.recording import end_compiled_code

# A rank's part of the model


SHOW_AFTER_S = 2.0
"""A prediction that takes longer than this shows a progress bar."""


def pipeline_stage(sizes: TransformerSizes, part: StageLayers) -> Transformer:
    """Return a pipeline stage: a transformer that lacks what other stages have.

    The input is (B, S) integers for the first stage, and (B, S, width) for the others. The output
    is (B, S, vocabulary) logits from the last stage, and (B, S, width) from the others. With tensor
    parallelism, each rank has only its part of S between stages.
    """
    if sizes.experts is not None and not part.first:  # dense layers are in the first stage
        experts = dataclasses.replace(sizes.experts, dense_layers=0)
        sizes = dataclasses.replace(sizes, experts=experts)
    stage = Transformer(dataclasses.replace(sizes, layers=part.layers))
    if not part.first:
        stage.embedding = stage.positions = None
    if not part.last:
        stage.norm = stage.output = None
    return stage


# PyTorch's own code


TENSOR_PLAN = {  # outside attention and feed_forward, each rank has a part of every sequence
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.*_norm": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "blocks.*.attention.[qkv]*": ColwiseParallel(),  # query, key, value
    "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.feed_forward": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    "blocks.*.feed_forward.[gu]*": ColwiseParallel(),  # gate, up
    "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
"""For ``parallelize_module``, by module name; ``*`` matches any characters."""


def apply_tp(model: Transformer, mesh: DeviceMesh, casts: LastCast | None = None) -> None:
    """Shard each layer across the ranks of a one-dimensional mesh, in place.

    Outside attention and the MLP, each rank holds a part of every sequence (sequence parallelism,
    Korthikanti et al., 2022). The logits stay sharded by vocabulary: compute the loss in
    ``loss_context``. For a model in float8, pass its ``casts``, so that inputs and gradients are
    gathered in float8.
    """
    styles: dict[str, ParallelStyle] = {**TENSOR_PLAN, "positions": TENSOR_PLAN["embedding"]}
    if casts is not None:
        summed = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        styles |= {"blocks.*.attention.output": summed, "blocks.*.feed_forward.down": summed}
        del styles["blocks.*.attention"], styles["blocks.*.feed_forward"]
    has = model.named_children()
    here = {name for name, part in has if name != "blocks" or next(part.children(), None)}
    plan = {name: style for name, style in styles.items() if name.partition(".")[0] in here}
    parallelize_module(model, mesh, plan)
    if casts is None:
        return
    block: Any
    for block in model.blocks:
        for part, output in (
            (block.attention, block.attention.output),
            (block.feed_forward, block.feed_forward.down),
        ):
            gather_input(part, casts)
            scatter_output(output, mesh, casts)


def loss_context(layout: Layout) -> AbstractContextManager[None]:
    """Return a context for loss and backward, in which tensor parallelism never gathers logits."""
    return loss_parallel() if layout.tp > 1 else nullcontext()


@contextmanager
def attention_context(mesh: DeviceMesh | None) -> Iterator[None]:
    """Provide a context for forward and backward in which a mesh's ranks share each sequence.

    This is PyTorch's context parallelism: each rank has a chunk from the first half of a sequence
    and the mirrored chunk from its second half, so all do the same amount of work in attention.
    Keys and values are gathered, and their gradients travel around a ring.
    """
    if mesh is None:
        yield
        return
    # Each rank creates only its own part of every sequence, so there's nothing left to split.
    nothing = torch.empty(2 * mesh.size())
    with context_parallel(
        mesh, buffers=[nothing], buffer_seq_dims=[0], no_restore_buffers={nothing}
    ):
        yield


def apply_fsdp(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Apply FSDP2 to a model and to each of its blocks, which are gathered one after another.

    The mesh has one dimension, or two for sharding within replicas (HSDP).
    """
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def recomputed(block: nn.Module, forward: Any, recompute: str, compiled: bool = False) -> Any:
    """Wrap a block's ``forward`` so that backward recomputes it, according to one of ``RECOMPUTE``.

    With selective recomputation, an eager block also saves the output of its last matmul, although
    backward doesn't need it. torch.compile's partitioner saves only what backward uses.
    """
    if recompute == "none":
        return forward
    options: dict[str, Any] = {}
    if recompute == "selective":
        saved_until = _last_unused_product(block) if compiled else math.inf
        options["context_fn"] = functools.partial(_keep_every_second_product, saved_until)
    return functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _last_unused_product(block: nn.Module) -> float:
    """Return the number of a block's last matmul, or infinity if backward needs its output."""
    parts = list(block.modules())
    matmuls = sum(isinstance(part, nn.Linear) for part in parts)
    for part in parts:
        if isinstance(part, Experts):
            # The router's matmul counts, the experts' batched ones don't; a shared expert is last.
            return math.inf if part.shared is None else matmuls + 1
    return matmuls


def _keep_every_second_product(saved_until: float) -> Any:
    """Return contexts that save what torchtitan's selective activation checkpointing saves.

    From matmul number ``saved_until`` on, nothing is saved.
    """
    products = {False: 0, True: 0}
    multiplies = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}
    kept = {
        torch.ops.aten.amax.default,  # for the scales of casts to float8
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = func in kept
        if func in multiplies:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        keeps = keeps and products[context.is_recompute] < saved_until
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class ParallelModel:
    """One virtual rank's model, or pipeline stage; ``module`` is wrapped by FSDP2.

    Parameters are gathered in bfloat16.
    """

    def __init__(self, model: Transformer, plan: Plan, mesh: DeviceMesh) -> None:
        """``model`` is on the meta device, so a GPU needs memory only for its own part.

        ``mesh`` is the mesh of the plan's layout.
        """
        casts = use_float8(model.blocks) if plan.float8 else None
        self._layout = layout = plan.layout
        self._context = layout.context_mesh("vgpu") if layout.cp > 1 else None
        if layout.tp > 1:
            apply_tp(model, mesh["tp"], casts)
        self._blocks = list(model.blocks)
        for block in self._blocks:
            block.register_forward_pre_hook(lambda _, inputs: _end_compiled_code(inputs[0]))
            block.register_forward_hook(lambda _, inputs, hidden: _end_compiled_code(hidden))
        if layout.ep > 1:
            experts_mesh = layout.expert_mesh("vgpu")
            for block in self._blocks:
                if isinstance(block.feed_forward, Experts):
                    block.feed_forward.divide(experts_mesh["ep"])
        self._forwards = [block.forward for block in self._blocks]
        dp = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, plan.reduce)
        )
        if layout.ep > 1:
            for block in self._blocks:
                if isinstance(block.feed_forward, Experts):
                    fully_shard(block.feed_forward.own, mesh=experts_mesh[dp], mp_policy=policy)
        # With thousands of shards, this takes minutes.
        blocks = progress("sharding blocks", "block", items=self._blocks)
        ends = (model.embedding, model.output) if plan.wrap_ends else ()  # a stage may lack them
        apply_fsdp(model, [*filter(None, ends), *blocks], mesh[dp], policy)
        self.module: Any = model._apply(_empty_on_gpu)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Set up what forward, loss and backward need."""
        loss, attention = loss_context(self._layout), attention_context(self._context)
        with loss, attention, warnings.catch_warnings():
            # With tensor parallelism, the embedding returns a view; nothing modifies it in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield

    @contextmanager
    def hooked(self, function: Callable[[], None]) -> Iterator[None]:
        """Call ``function`` four times in each forward and backward pass.

        It's called when the model's and the first block's forward start, after the last block's
        backward, and before the first block's. In between, memory peaks at the same operation
        whatever the number of blocks, if there are at least four.
        """

        def on_hidden(block: nn.Module, inputs: object, hidden: torch.Tensor) -> None:
            hidden.register_hook(lambda _: function())

        blocks = self._blocks
        with ExitStack() as hooks:
            for module in (self.module, blocks[0]):
                hooks.enter_context(module.register_forward_pre_hook(lambda *_: function()))
            for block in (blocks[0], blocks[-2:][0]):
                hooks.enter_context(block.register_forward_hook(on_hidden))
            yield

    def configure(self, plan: Plan, compiled: bool = False) -> None:
        """Set what may change from step to step: the recomputation, and FSDP2's resharding.

        ``compiled`` blocks save less.
        """
        block: Any
        for index, (block, forward) in enumerate(zip(self._blocks, self._forwards, strict=True)):
            recompute = plan.recompute if index % plan.recompute_every == 0 else "none"
            block.forward = recomputed(block, forward, recompute, compiled)
            block.set_reshard_after_forward(plan.reshard_after_forward, recurse=False)
            if self._layout.ep > 1 and isinstance(block.feed_forward, Experts):
                own: Any = block.feed_forward.own
                own.set_reshard_after_forward(plan.reshard_after_forward)


def _end_compiled_code(hidden: torch.Tensor) -> None:
    """End compiled code where a block's forward or backward pass starts or ends.

    Blocks are compiled one by one, as in torchtitan.
    """
    end_compiled_code()
    if hidden.requires_grad:
        hidden.register_hook(lambda _: end_compiled_code())


def adam(module: nn.Module) -> torch.optim.AdamW:
    """Create a fused AdamW, with a parameter group for each block and one for the rest.

    For each operator, DTensor inspects the entire list of tensors, which would take seconds for all
    blocks at once.
    """
    blocks = [child for child in module.modules() if isinstance(child, TransformerBlock)]
    groups = [list(block.parameters()) for block in blocks]
    inside = {id(parameter) for group in groups for parameter in group}
    groups.append([p for p in module.parameters() if id(p) not in inside])
    return torch.optim.AdamW([{"params": group} for group in groups if group], fused=True)


def adam_with_state(module: nn.Module) -> torch.optim.AdamW:
    """Create the module's optimizer, and the state that its first step would create."""
    optimizer = adam(module)
    for p in module.parameters():
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": _zeros(p), "exp_avg_sq": _zeros(p)}
    return optimizer


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return _of_own_part(torch.zeros_like, like)


def _empty_on_gpu(like: torch.Tensor) -> torch.Tensor:
    return _of_own_part(functools.partial(torch.empty_like, device="vgpu"), like)


def _of_own_part(make: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Call ``make`` for a tensor or, if it's a DTensor, for this rank's part of it.

    On each new mesh, DTensor itself would first look for the best placements of ``zeros_like``,
    which takes a second if the mesh has three dimensions.
    """
    if not isinstance(like, DTensor):
        return make(like)
    return DTensor.from_local(
        make(like.to_local()),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@contextmanager
def without_garbage() -> Iterator[None]:
    """When the block ends, collect the garbage that it left in reference cycles.

    FSDP2 replaces parameters; without this, the old ones' memory would be freed in the middle of a
    later step. With automatic collection off, all new objects are in the youngest generation, which
    is quick to collect, whereas a full collection goes through all of torch's objects.
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
    """Return a progress bar, shown if a prediction takes long, except in worker processes.

    Pass ``total``, the number of updates, or ``items`` to iterate over.
    """
    child = multiprocessing.parent_process() is not None
    options = {"unit": unit, "leave": False, "delay": SHOW_AFTER_S, "disable": child}
    return tqdm(items, what, total, **options)
