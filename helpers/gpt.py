"""What ``notebooks/train.py`` needs apart from the training itself.

This includes model sizes, FLOPs and optimizer groups, how a rank finds its GPU and the other ranks,
and messages.
"""

import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vgpu.plan.estimate import flop_per_token
from vgpu.plan.parallel_model import TENSOR_PLAN as TENSOR_PLAN
from vgpu.plan.transformer import LETTERS, LLAMA, TransformerSizes

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

MODELS = {"letters": LETTERS, **LLAMA}
"""Sizes of a ``Transformer``: a small one to train here, and those of Llama 3.1."""

PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100 80GB HBM3": 989,  # SXM
    "A100": 312,
    "V100-SXM2": 125,
}
"""Dense 16-bit TFLOP/s from NVIDIA's datasheets, by the first key that the GPU's name contains."""


def speed(tokens_per_s: float, sizes: TransformerSizes, device: str) -> str:
    """Format all ranks' tokens/s, with peak memory on a GPU, and MFU on a real one."""
    text = f"{tokens_per_s:,.0f} tokens/s"
    if device != "cpu":
        text += f", {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB at the peak"
    if device == "cuda":
        name = torch.cuda.get_device_name()
        peaks = [tflops for gpu, tflops in PEAK_TFLOPS.items() if gpu in name and "MIG" not in name]
        if not peaks:
            return f"{text}, MFU unknown: PEAK_TFLOPS in helpers/gpt.py lacks {name}"
        flop_per_s = tokens_per_s / dist.get_world_size() * flop_per_token(sizes, sizes.sequence)
        text += f", MFU {flop_per_s / (peaks[0] * 1e12):.1%}"
    return text


def join() -> str:
    """Choose this rank's GPU, or the CPU if there is none, and join the process group."""
    device, ranks_here = "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if (gpus := torch.accelerator.device_count()) and not torch.backends.mps.is_available():
        if gpus < ranks_here:
            refuse(
                f"this host has more ranks ({ranks_here}) than GPUs ({gpus}): start one rank per GPU, "
                "or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device = accelerator.type  # "cuda", or "vgpu" for virtual GPUs
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        torch.set_float32_matmul_precision("high")  # TF32: 10 of 23 mantissa bits
    if dist.is_initialized():  # by python -m vgpu --cluster
        return device
    backend = dist.get_default_backend_for_device(device)
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{backend}"
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        refuse(
            "torchrun's --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: "
            "with the old store, restarted ranks may wait for ranks that are gone"
        )
    store: Any = dist.HashStore()
    if "RANK" in os.environ:
        store, *_ = next(dist.rendezvous("env://"))
        store.set(f"device of {RANK}", device)
        kinds = {store.get(f"device of {rank}").decode() for rank in range(RANKS)}
        if len(kinds) > 1:  # their collectives would never complete
            found = ", ".join(sorted(kinds))
            refuse(f"either all ranks must have a GPU or none may; their devices are {found}")
    dist.init_process_group(backend, store=store, rank=RANK, world_size=RANKS)
    return device


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: matrices have weight decay, the norms' weights don't."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def refuse(message: object) -> NoReturn:
    """Print a sentence to stderr, once per host, and exit."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def facts(mesh: DeviceMesh, sizes: TransformerSizes, batch: int) -> str:
    """Return a line that describes the model, the batch and the devices."""
    named = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    layout = ", ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "1 rank"
    kind = mesh.device_type
    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    tokens = batch * sizes.sequence
    return f"{sizes.parameters:,} parameters, {tokens:,} tokens per step; {device}: {layout}"


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
