"""Train a GPT on one device or many: DDP, FSDP2 and tensor parallelism, alone or together.

    python train.py                                                      one process
    torchrun --nproc-per-node 4 train.py --checkpoints run               four GPUs, sharded by FSDP2
    torchrun --nproc-per-node 4 -m vgpu train.py --dp-shard 2 --tp 2     four virtual GPUs

It learns letters from Python's own documentation; for a run of your own, put other samples
in the place of ``batches``, and your model in that of ``GPT``. The same command again goes on from
the last checkpoint: bit for bit in the same layout, up to rounding in another.
"""

import math
import os
import shutil
import signal
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from helpers.gpt import GPT, TENSOR_PLAN
from helpers.text import VOCABULARY, batches, letters

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "V100": 125}  # dense, 16 bits


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    numbers = {
        "dp-replicate": (1, "copies of the model"),
        "dp-shard": (0, "ranks that share a copy by FSDP2; 0 for all that are left"),
        "tp": (1, "ranks that share each layer"),
        "layers": (2, "of the GPT"),
        "width": (128, "of its layers"),
        "heads": (4, "of attention"),
        "sequence": (64, "tokens of a sequence"),
        "batch": (32, "sequences of a step, on all ranks together"),
        "steps": (100, "of the whole training"),
        "save-every": (20, "steps between checkpoints"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.004, help="top (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--recompute", action="store_true", help="keep only the blocks' inputs")
    parser.add_argument("--compile", action="store_true", help="torch.compile for each block")
    parser.add_argument("--checkpoints", type=Path, help="a folder to write into and go on from")
    parser.add_argument("--lose", help="RANK:STEP, a fire drill: kill that rank after that step")
    options = parser.parse_args()
    sizes = mesh_sizes(options)
    # With tensor parallelism the embedding returns a view; nothing here changes it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    device, ranks_here = torch.device("cpu"), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.accelerator.device_count() >= ranks_here and not torch.backends.mps.is_available():
        kind = torch.accelerator.current_accelerator().type
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device.type)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    store = dist.HashStore()
    if "RANK" in os.environ:  # torchrun's store outlives a restart: forget ranks that are gone
        store, *_ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"start {store.add(f'starts of {RANK}', 1)}", store)
    dist.init_process_group(backend, store=store, rank=RANK, world_size=RANKS)
    try:
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        train(options, mesh, device)
    finally:
        dist.destroy_process_group()


def mesh_sizes(options: Namespace) -> dict[str, int]:
    """Of the mesh's dimensions; refuses what does not divide."""
    replicas, tp = options.dp_replicate, options.tp
    shards = options.dp_shard or max(1, RANKS // max(1, replicas * tp))
    if replicas * shards * tp != RANKS:
        refuse(f"{RANKS} ranks are not dp_replicate {replicas} × dp_shard {shards} × tp {tp}")
    for name, size, parts in (
        ("--batch", options.batch, replicas * shards),
        ("--heads", options.heads, tp),
        ("--width", options.width, 2 * options.heads),
        ("--sequence", options.sequence, tp),
        ("the vocabulary,", len(VOCABULARY), tp),
    ):
        if size < parts or size % parts:
            refuse(f"{name} {size} does not divide into {parts} equal parts")
    return {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}


def train(options: Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    with torch.device("meta"):
        model = GPT(options.layers, options.width, options.heads, len(VOCABULARY))
    products = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    flop_per_token = 6 * products + 12 * options.layers * options.width * options.sequence
    parallel(model, mesh, options)
    model.to_empty(device=device).initialize()
    if RANKS == mesh["dp_replicate"].size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    checkpoints = Checkpoints(options.checkpoints, model, optimizer)
    begin = checkpoints.load()
    tp, ddp = mesh["tp"].size(), not isinstance(next(model.parameters()), DTensor)
    sharded_loss = loss_parallel if tp > 1 else nullcontext
    # Ranks of tp compute on the same samples. The seed decides on all batches, also after a restart.
    place = {"rank": RANK // tp, "world_size": RANKS // tp}
    data = batches(letters(train=True), options.batch, options.sequence, **place)
    began_s, shown = time.perf_counter(), begin
    for step, (inputs, targets) in enumerate(islice(data, begin, options.steps), begin + 1):
        for group in optimizer.param_groups:  # ten steps of warming up, then half a cosine
            cosine = 0.5 + 0.5 * math.cos(math.pi * (step - 1) / options.steps)
            group["lr"] = options.learning_rate * min(step / 10, cosine)
        with sharded_loss():
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16 and ddp):
                logits = model(inputs.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            mean = whole(loss.detach())
            dist.all_reduce(mean)
            line = f"step {step}: loss {mean.item() / RANKS:.6f}, norm {whole(norm).item():.4f}"
            now_s = time.perf_counter()  # .item() has waited for the GPU
            tokens = (step - shown) * options.batch * options.sequence
            say(f"{line}, {speed(tokens / (now_s - began_s), flop_per_token, device)}")
            began_s, shown = now_s, step
        if step % options.save_every == 0 or step == options.steps:
            checkpoints.save(step)
        if options.lose == f"{RANK}:{step}" and begin == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.wait()


def speed(tokens_per_s: float, flop_per_token: int, device: torch.device) -> str:
    """As measured; with model FLOPs utilization (MFU) on a GPU whose peak is known."""
    text = f"{tokens_per_s:,.0f} tokens/s"
    if device.type != "cpu":
        text += f", {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB at the peak"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for gpu, tflops in PEAK_TFLOPS.items():
        if gpu in name:
            text += f", MFU {tokens_per_s * flop_per_token / RANKS / (tflops * 1e12):.1%}"
    return text


def parallel(model: GPT, mesh: DeviceMesh, options: Namespace) -> None:
    """Divide the model, still on the meta device, by the mesh; in the order in which these compose."""
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], TENSOR_PLAN)
    model.recompute = options.recompute
    if options.compile:
        for block in model.blocks:
            block.compile()
    if mesh["dp_shard"].size() == mesh["tp"].size() == 1:
        return  # copies, which DistributedDataParallel keeps equal
    replicated = mesh["dp_replicate"].size() > 1
    dp = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (model.embedding, *model.blocks, model.output, model):
        fully_shard(module, mesh=dp, mp_policy=policy)


class Checkpoints:
    """In a folder that all hosts share, if any; one is whole once ``.metadata`` is written, last."""

    def __init__(self, folder: Path | None, *state: Any) -> None:
        self.folder, self.state, self.writing = folder, state, Future()
        self.writing.set_result(None)
        self.group = dist.new_group(backend="gloo")  # for the thread that writes

    def last(self) -> Path | None:
        found = self.folder.glob("step-*/.metadata") if self.folder else ()
        return max((path.parent for path in found), default=None)

    def load(self) -> int:
        """The last whole checkpoint's step, from which to go on; 0 where there is none."""
        found = [self.last()]
        dist.broadcast_object_list(found, src=0)
        if not (path := found[0]):
            return 0
        model, optimizer = get_state_dict(*self.state)
        try:
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        except CheckpointException as error:
            refuse(f"{path} is not of this model, or is damaged: {reason(error)}")
        set_state_dict(*self.state, model_state_dict=model, optim_state_dict=optimizer)
        say(f"resumed from {path}")
        return int(path.name.removeprefix("step-"))

    def save(self, step: int) -> None:
        self.wait()
        if self.folder:
            path, (model, optimizer) = self.folder / f"step-{step:08d}", get_state_dict(*self.state)
            for old in set(self.folder.glob("step-*")) - {self.last(), path} if RANK == 0 else ():
                shutil.rmtree(old)
            state = {"model": model, "optimizer": optimizer}
            self.writing = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def wait(self) -> None:
        """Until the last checkpoint is whole; every rank learns of an error on any of them."""
        try:
            self.writing.result()
        except CheckpointException as error:
            advice = "Make room or choose another folder; the last whole checkpoint is kept"
            refuse(f"cannot write into {self.folder}: {reason(error)}. {advice}")


def reason(error: CheckpointException) -> str:
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank} found {type(failure).__name__}: {str(failure).splitlines()[0]}"


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
