"""Train a GPT on one device or many: DDP, FSDP2 and tensor parallelism, alone or together.

    python train.py                                                      one process
    torchrun --nproc-per-node 4 train.py --checkpoints run               four GPUs, sharded by FSDP2
    torchrun --nproc-per-node 4 -m vgpu train.py --dp-shard 2 --tp 2     four virtual GPUs

and on 64 H100s that do not exist, where its second step is predicted:

    python -m vgpu --cluster 8x8 --gpu H100 train.py --model 8B --batch 64 --bf16 --recompute

It learns letters from Python's own documentation; for a run of your own, put other samples
in the place of ``batches``, and your model in that of ``Transformer``. The same command again goes
on from the last checkpoint: bit for bit in the same layout on the CPU, otherwise up to rounding.
"""

import math
import os
import signal
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers.checkpoints import CheckpointRefused, Checkpoints, load_whole
from helpers.gpt import MODELS, TENSOR_PLAN
from helpers.text import batches, letters
from vgpu.plan.transformer import Transformer, TransformerSizes

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "V100": 125}  # dense, 16 bits


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    numbers = {
        "dp-replicate": (1, "copies of the model"),
        "dp-shard": (0, "ranks that share a copy by FSDP2; 0 for all that are left"),
        "tp": (1, "ranks that share each layer"),
        "layers": (0, "of the model; 0 for its own"),
        "width": (0, "of the model; 0 for its own"),
        "sequence": (0, "tokens of a sequence; 0 for the model's own"),
        "batch": (32, "sequences of a step, on all ranks together"),
        "steps": (100, "of the whole training"),
        "save-every": (20, "steps between checkpoints"),
    }
    parser.add_argument("--model", choices=MODELS, default="letters", help="sizes (%(default)s)")
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.004, help="top (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--recompute", action="store_true", help="keep only the blocks' inputs")
    parser.add_argument("--compile", action="store_true", help="torch.compile for each block")
    parser.add_argument("--weights", type=Path, help="a whole state dict to begin with")
    parser.add_argument("--checkpoints", type=Path, help="a folder to write into and go on from")
    parser.add_argument("--lose", help="RANK:STEP, a fire drill: kill that rank after that step")
    options = parser.parse_args()
    for name, (default, _) in numbers.items():
        if getattr(options, name.replace("-", "_")) < (least := min(default, 1)):
            refuse(f"--{name} must be at least {least}")
    sizes = MODELS[options.model]
    own = {name: getattr(options, name) for name in ("layers", "width", "sequence")}
    sizes = replace(sizes, **{name: value for name, value in own.items() if value})
    dimensions = mesh_dimensions(options, sizes)
    # With tensor parallelism the embedding returns a view; nothing here changes it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    device = join()
    try:
        mesh = init_device_mesh(
            device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)
        )
        train(options, sizes, mesh, device)
    except CheckpointRefused as error:
        refuse(error)
    finally:
        dist.destroy_process_group()


def join() -> torch.device:
    """Take this rank's GPU, or the CPU where there are too few, and meet the other ranks."""
    device, ranks_here = torch.device("cpu"), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.accelerator.device_count() >= ranks_here and not torch.backends.mps.is_available():
        kind = torch.accelerator.current_accelerator().type
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    if dist.is_initialized():  # by python -m vgpu --cluster
        return device
    backend = dist.get_default_backend_for_device(device.type)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    store = dist.HashStore()
    if "RANK" in os.environ:  # torchrun's store outlives a restart: forget ranks that are gone
        store, *_ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"start {store.add(f'starts of {RANK}', 1)}", store)
    dist.init_process_group(backend, store=store, rank=RANK, world_size=RANKS)
    return device


def mesh_dimensions(options: Namespace, sizes: TransformerSizes) -> dict[str, int]:
    """Their sizes, the ranks of the last one being neighbors; refuses what does not divide."""
    try:
        sizes.check()
    except ValueError as error:
        refuse(error)
    replicas, tp = options.dp_replicate, options.tp
    shards = options.dp_shard or max(1, RANKS // (replicas * tp))
    if replicas * shards * tp != RANKS:
        refuse(f"{RANKS} ranks are not dp_replicate {replicas} × dp_shard {shards} × tp {tp}")
    for name, size, parts in (
        ("sequences in a batch", options.batch, replicas * shards),
        ("key-value heads", sizes.key_value_heads, tp),
        ("tokens in a sequence", sizes.sequence, tp),
        ("tokens that there are", sizes.vocabulary, tp),
    ):
        if size % parts:
            refuse(f"{size} {name} do not divide into {parts} equal parts")
    return {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}


def divide(model: Transformer, mesh: DeviceMesh, options: Namespace) -> None:
    """By the mesh, still on the meta device; in the order in which these compose."""
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], TENSOR_PLAN)
    for block in model.blocks:
        if options.recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if options.compile:
            block.compile()
    if mesh["dp_shard"].size() == mesh["tp"].size() == 1:
        return  # copies, which DistributedDataParallel keeps equal
    replicated = mesh["dp_replicate"].size() > 1
    dp = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (model.embedding, *model.blocks, model.output, model):
        fully_shard(module, mesh=dp, mp_policy=policy)


def build(
    options: Namespace, sizes: TransformerSizes, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(sizes)
    divide(model, mesh, options)
    model.to_empty(device=device)  # room for this rank's part, and for nothing else
    model.initialize()
    if options.weights:
        load_whole(model, options.weights)
    if RANKS == mesh["dp_replicate"].size() > 1:
        return DistributedDataParallel(model)
    return model


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], bf16: bool
) -> tuple[Tensor, Tensor]:
    """The mean loss of this rank's samples, and the norm of the whole gradient."""
    parameter = next(model.parameters())
    inputs, targets = (part.to(parameter.device) for part in batch)  # (B, S) each
    kind, sharded = parameter.device.type, isinstance(parameter, DTensor)
    with torch.autocast(kind, torch.bfloat16, enabled=bf16 and not sharded):
        logits = model(inputs)  # (B, S, vocabulary)
    with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        del logits  # only the loss holds them while backward runs
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def train(
    options: Namespace, sizes: TransformerSizes, mesh: DeviceMesh, device: torch.device
) -> None:
    model = build(options, sizes, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    checkpoints = Checkpoints(options.checkpoints, model, optimizer)
    begin = checkpoints.load()
    # Ranks of tp compute on the same samples. The seed decides on all batches, also after a restart.
    tp = mesh["tp"].size()
    place = {"rank": RANK // tp, "world_size": RANKS // tp}
    data = batches(letters(train=True), options.batch, sizes.sequence, **place)
    began_s, shown = time.perf_counter(), begin
    for step, batch in enumerate(islice(data, begin, options.steps), begin + 1):
        for group in optimizer.param_groups:  # ten steps of warming up, then half a cosine
            cosine = 0.5 + 0.5 * math.cos(math.pi * (step - 1) / options.steps)
            group["lr"] = options.learning_rate * min(step / 10, cosine)
        loss, norm = train_step(model, optimizer, batch, options.bf16)
        if step % 10 == 0:
            mean = whole(loss)
            dist.all_reduce(mean)
            line = f"step {step}: loss {mean.item() / RANKS:.6f}, norm {whole(norm).item():.4f}"
            now_s = time.perf_counter()  # .item() has waited for the GPU
            tokens = (step - shown) * options.batch * sizes.sequence
            say(f"{line}, {speed(tokens / (now_s - began_s), sizes, device)}")
            began_s, shown = now_s, step
        if step % options.save_every == 0 or step == options.steps:
            checkpoints.save(step)
        if options.lose == f"{RANK}:{step}" and begin == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.wait()


def speed(tokens_per_s: float, sizes: TransformerSizes, device: torch.device) -> str:
    """As measured; with model FLOPs utilization (MFU) on a GPU whose peak is known."""
    text = f"{tokens_per_s:,.0f} tokens/s"
    if device.type != "cpu":
        text += f", {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB at the peak"
    products = sizes.parameters - sizes.vocabulary * sizes.width  # an embedding is looked up
    flop_per_token = 6 * products + 12 * sizes.layers * sizes.width * sizes.sequence
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for gpu, tflops in PEAK_TFLOPS.items():
        if gpu in name:
            text += f", MFU {tokens_per_s * flop_per_token / RANKS / (tflops * 1e12):.1%}"
    return text


def say(line: str) -> None:
    if RANK == 0:
        print(line, flush=True)


def refuse(message: object) -> NoReturn:
    if RANK == 0:  # every rank finds the same
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    main()
