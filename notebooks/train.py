"""Train a GPT on one device or many: DDP, FSDP2 and tensor parallelism, alone or together.

    python train.py                                                      one process
    torchrun --nproc-per-node 4 train.py --checkpoints run               four GPUs, sharded by FSDP2
    torchrun --nproc-per-node 4 -m vgpu train.py --dp-shard 2 --tp 2     four virtual GPUs
    python -m vgpu --cluster 8x8 --gpu H100 train.py --batch 64          predict a step on 64 GPUs

The same command resumes from the last checkpoint: bit for bit with the same layout on the CPU,
otherwise up to rounding. The training text is Python's own documentation. For your own run, change:

    data          train: use any (N,) tensor, such as torch.from_file(...), for letters(...); or your
                  own endless batches, starting at batch skip, with equally many targets on all ranks
    model         build: the module, whose initialize must fill what to_empty leaves undefined
    sharding      TENSOR_PLAN in vgpu/plan/parallel_model.py; in divide, what FSDP2 gathers at once
    sizes, MFU    helpers/gpt.py: MODELS; in speed, the FLOPs per token and the GPUs' peaks
    dimensions    mesh_dimensions, then divide; in train, place says which ranks share samples
    location      also copy helpers/gpt.py, checkpoints.py and text.py; the model is in vgpu.plan
"""

import math
import os
import signal
import time
import warnings
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers.checkpoints import CheckpointRefused, Checkpoints, load_whole
from helpers.gpt import MODELS, RANK, RANKS, TENSOR_PLAN, facts, groups, join, refuse, speed, whole
from helpers.text import batches, letters
from vgpu.plan.transformer import Transformer, TransformerSizes


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    numbers = {
        "dp-replicate": (1, "copies of the model"),
        "dp-shard": (0, "ranks over which FSDP2 shards each copy; 0 for all that remain"),
        "tp": (1, "ranks that split each layer"),
        "layers": (0, "number of layers; 0 for the model's own"),
        "width": (0, "hidden size; 0 for the model's own"),
        "sequence": (0, "tokens per sequence; 0 for the model's own"),
        "batch": (32, "sequences per step, over all ranks"),
        "accumulate": (1, "micro-batches per step; replicas all-reduce only in the last"),
        "steps": (100, "steps in total"),
        "warm-up": (10, "steps during which the learning rate rises"),
        "save-every": (20, "steps between held-out losses, and between checkpoints"),
    }
    parser.add_argument("--model", choices=MODELS, default="letters", help="size (%(default)s)")
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.004, help="peak (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--recompute", action="store_true", help="keep only the blocks' inputs")
    parser.add_argument("--compile", action="store_true", help="torch.compile for each block")
    parser.add_argument("--weights", type=Path, help="a full state dict to start from")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all hosts share")
    parser.add_argument("--lose", help="RANK:STEP: kill that rank after that step (a fire drill)")
    options = parser.parse_args()
    for name, (default, _) in numbers.items():
        if getattr(options, name.replace("-", "_")) < (least := min(default, 1)):
            refuse(f"--{name} must be at least {least}")
    if not 0 <= options.learning_rate < math.inf:
        refuse(f"--learning-rate must be finite and at least 0, got {options.learning_rate}")
    own = {name: getattr(options, name) for name in ("layers", "width", "sequence")}
    sizes = replace(MODELS[options.model], **{name: n for name, n in own.items() if n})
    axes = mesh_dimensions(options, sizes)
    # With tensor parallelism the embedding returns a view; nothing here changes it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    device = join()
    try:
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        train(options, sizes, mesh, device)
    except CheckpointRefused as error:  # on every rank
        refuse(error)
    dist.destroy_process_group()  # not after an error, when it could wait for ranks forever


def mesh_dimensions(options: Namespace, sizes: TransformerSizes) -> dict[str, int]:
    """Return the dimensions' sizes, innermost last; refuse counts that don't divide evenly."""
    try:
        sizes.check()
    except ValueError as error:
        refuse(error)
    replicas, tp = options.dp_replicate, options.tp
    shards = options.dp_shard or max(1, RANKS // (replicas * tp))
    if replicas * shards * tp != RANKS:
        refuse(f"dp_replicate {replicas} × dp_shard {shards} × tp {tp} != world size {RANKS}")
    for name, size, parts in (
        ("sequences in a batch", options.batch, replicas * shards * options.accumulate),
        ("key-value heads", sizes.key_value_heads, tp),
        ("tokens in a sequence", sizes.sequence, tp),
        ("tokens in the vocabulary", sizes.vocabulary, tp),
    ):
        if size % parts:
            refuse(f"{size} {name} can't be split into {parts} equal parts")
    return {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}


def divide(model: Transformer, mesh: DeviceMesh, options: Namespace) -> None:
    """Parallelize the model over the mesh, on the meta device; the order of the steps matters."""
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], TENSOR_PLAN)
    for block in model.blocks:
        if options.recompute:
            # A lambda, because torch.compile skips a module whose forward is checkpoint itself.
            block.forward = lambda *x, f=block.forward: checkpoint(f, *x, use_reentrant=False)
        if options.compile:
            block.compile(fullgraph=True)
    if mesh["dp_shard"].size() == mesh["tp"].size() == 1:
        return  # copies, which DistributedDataParallel keeps equal
    replicated = mesh["dp_replicate"].size() > 1
    dp = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    # Inputs aren't cast: the blocks multiply by cos and sin in float32.
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for module in (model.embedding, *model.blocks, model.output, model):
        fully_shard(module, mesh=dp, mp_policy=policy)


def build(
    options: Namespace, sizes: TransformerSizes, mesh: DeviceMesh, resumes: bool
) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(sizes)
    divide(model, mesh, options)
    model.to_empty(device=mesh.device_type)  # allocates only this rank's part
    model.initialize(only_buffers=resumes or bool(options.weights))
    if options.weights and not resumes:
        load_whole(model, options.weights)
    if RANKS == mesh["dp_replicate"].size() > 1:
        return DistributedDataParallel(model, forward_sync_buffers=False)
    return model


def backward(model: nn.Module, inputs: Tensor, targets: Tensor, options: Namespace) -> Tensor:
    """Accumulate the gradients for (B, S) tokens; return their mean loss."""
    with loss_parallel() if options.tp > 1 else nullcontext():
        loss = loss_of(model, inputs, targets, options)
        (loss / options.accumulate).backward()
    return whole(loss.detach())


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, options: Namespace) -> Tensor:
    sharded = isinstance(next(model.parameters()), DTensor)  # then FSDP2 casts, not autocast
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=options.bf16 and not sharded):
        logits = model(inputs)  # (B, S, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: list[tuple[Tensor, Tensor]], options: Namespace) -> float:
    """Return the mean loss over all ranks, on batches that the model isn't trained on."""
    device, losses = next(model.parameters()).device, []
    with loss_parallel() if options.tp > 1 else nullcontext():
        for inputs, targets in data:
            losses.append(whole(loss_of(model, inputs.to(device), targets.to(device), options)))
    dist.all_reduce(loss := torch.stack(losses).mean())
    return loss.item() / RANKS


def train_step(
    model: nn.Module, optimizer: torch.optim.AdamW, batch: tuple[Tensor, ...], options: Namespace
) -> tuple[Tensor, Tensor]:
    """Train a step; return the mean loss of this rank's samples, and the full gradient's norm."""
    losses: list[Tensor] = []
    for inputs, targets in zip(*(part.chunk(options.accumulate) for part in batch), strict=True):
        is_last = len(losses) == options.accumulate - 1
        # FSDP2 reduce-scatters each micro-batch's gradients; replicas all-reduce only in the last.
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(is_last)
        waits = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if waits else nullcontext():
            losses.append(backward(model, inputs, targets, options))
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # the same on every rank
    # If it's 1, a fused optimizer changes nothing, as with GradScaler; the host doesn't wait.
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean(), norm


def train(options: Namespace, sizes: TransformerSizes, mesh: DeviceMesh, device: str) -> None:
    checkpoints = Checkpoints(options.checkpoints, sizes, options)
    model = build(options, sizes, mesh, resumes=checkpoints.last is not None)
    optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.95), fused=True)
    begin = checkpoints.load(model, optimizer)
    if RANK == 0:
        print(facts(mesh, sizes, options.batch), flush=True)
    # The ranks of a tp group share samples. The seed determines all batches, even after a restart.
    place = {"rank": RANK // options.tp, "world_size": RANKS // options.tp}
    data = batches(letters(train=True), options.batch, sizes.sequence, skip=begin, **place)
    micro_batch = options.batch // options.accumulate
    held_out = batches(letters(train=False), micro_batch, sizes.sequence, **place)
    held_out = list(islice(held_out, 4))
    began_s, shown = time.perf_counter(), begin
    skipped, in_a_row = torch.zeros((2, 1), device=device)
    for step, batch in enumerate(islice(data, max(0, options.steps - begin)), begin + 1):
        if device != "cpu":  # pinned, so the host doesn't wait for the copy
            batch = tuple(part.pin_memory().to(device, non_blocking=True) for part in batch)
        for group in optimizer.param_groups:  # warm-up, then half a cosine
            cosine = 0.5 + 0.5 * math.cos(math.pi * (step - 1) / options.steps)
            group["lr"] = options.learning_rate * min(step / options.warm_up, cosine)
        loss, norm = train_step(model, optimizer, batch, options)
        skipped += optimizer.found_inf
        in_a_row = (in_a_row + 1) * optimizer.found_inf
        ends = (is_stopped := checkpoints.asked_to_stop()) or step == options.steps
        if step % 10 == 0 or ends:
            dist.all_reduce(loss)
            line = f"step {step}: loss {loss.item() / RANKS:.6f}, norm {norm.item():.4f}"
            now_s = time.perf_counter()  # .item() has waited for the GPU
            tokens_per_s = (step - shown) * options.batch * sizes.sequence / (now_s - began_s)
            line += f", {speed(tokens_per_s, sizes, device)}"
            count = int(skipped.item())
            line += f", skipped updates: {count} (gradients not finite)" if count else ""
            if RANK == 0:
                print(line, flush=True)
            if in_a_row.item() >= 10:
                refuse("none of the last 10 gradients was finite")
            began_s, shown, skipped = now_s, step, 0 * skipped
        if step % options.save_every == 0 or ends:
            checkpoints.save(step)
            line = f"step {step}: held-out loss {evaluate(model, held_out, options):.6f}"
            if RANK == 0:
                print(line, flush=True)
        if is_stopped:
            checkpoints.wait()
            refuse(f"stopped by SIGTERM after step {step}; the same command continues from there")
        if options.lose == f"{RANK}:{step}" and begin == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.wait()


if __name__ == "__main__":
    main()
