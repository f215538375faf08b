"""Print a GPU's errors, peak bytes and times as one JSON object. Written for CUDA.

``python observed.py`` observes real GPUs; ``python -m vgpu --cuda-is-vgpu observed.py`` runs the
same lines on virtual ones. Cases that need more GPUs are skipped.
"""

import json
import statistics
import sys
from contextlib import nullcontext

import torch
from torch import nn

import vgpu
from vgpu.plan.transformer import Transformer, TransformerSizes

KIB, MIB = 2**10, 2**20


def on(index, *size):
    return torch.ones(*size, device=f"cuda:{index}")


# The number of GPUs that each needs, and a function that raises an error.
ERRORS = {
    "matmul, CPU": (1, lambda: on(0, 2, 2) @ torch.ones(2, 2)),
    "elementwise, CPU": (1, lambda: on(0, 2) * torch.ones(2)),
    "GPU scalar, CPU vector": (1, lambda: torch.ones(2) + on(0, 2)[0]),
    "linear, CPU input": (1, lambda: nn.Linear(2, 2).cuda()(torch.ones(1, 2))),
    "embedding, CPU index": (1, lambda: nn.Embedding(3, 2).cuda()(torch.tensor([1]))),
    "loss, CPU labels": (
        1,
        lambda: nn.functional.cross_entropy(on(0, 2, 3), torch.tensor([0, 1])),
    ),
    "layer norm, CPU weight": (1, lambda: nn.LayerNorm(3)(on(0, 2, 3))),
    "convolution, CPU input": (1, lambda: nn.Conv2d(1, 1, 1).cuda()(torch.ones(1, 1, 2, 2))),
    "convolution, CPU weight": (1, lambda: nn.Conv2d(1, 1, 1)(on(0, 1, 1, 2, 2))),
    "LSTM, CPU input": (1, lambda: nn.LSTM(2, 2).cuda()(torch.ones(1, 1, 2))),
    "CPU gradient": (1, lambda: setattr(on(0, 2), "grad", torch.ones(2))),
    "CPU generator": (1, lambda: torch.randn(2, device="cuda:0", generator=torch.Generator())),
    "to numpy": (1, lambda: on(0, 2).numpy()),
    "cat, CPU": (1, lambda: torch.cat([on(0, 2), torch.ones(2)])),
    "pin a GPU's tensor": (1, lambda: on(0, 2).pin_memory()),
    "an ordinal out of range": (1, lambda: on(torch.cuda.device_count(), 1)),
    "out of memory": (1, lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda:0")),
    "matmul, two GPUs": (2, lambda: on(0, 2, 2) @ on(1, 2, 2)),
    "elementwise, two GPUs": (2, lambda: on(0, 2) + on(1, 2)),
    "index of another GPU": (2, lambda: on(0, 2)[torch.tensor([0], device="cuda:1")]),
    "DataParallel, wrong GPU": (
        2,
        lambda: nn.DataParallel(nn.Linear(2, 2).cuda(1), device_ids=[0, 1])(torch.ones(2, 2)),
    ),
}


def errors():
    """Map each name to the type and message of the error, or to "nothing was raised"."""
    found = {}
    for name, (gpus, wrong) in ERRORS.items():
        if gpus <= torch.cuda.device_count():
            try:
                wrong()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            else:
                found[name] = "nothing was raised"
    return found


def mlp(width, depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def gpt():
    return Transformer(TransformerSizes(2, 128, 4, 4, 512, 512))


# The number of GPUs that share the batch, the model, its input on the CPU, and the optimizer.
STEPS = {
    "MLP, SGD": (1, lambda: mlp(512, 8), lambda: torch.ones(256, 512), torch.optim.SGD),
    "MLP, Adam": (1, lambda: mlp(512, 8), lambda: torch.ones(256, 512), torch.optim.Adam),
    "GPT, Adam": (1, gpt, lambda: torch.arange(512).view(4, 128) % 512, torch.optim.Adam),
    "MLP, DataParallel": (
        2,
        lambda: nn.DataParallel(mlp(512, 8), device_ids=[0, 1]),
        lambda: torch.ones(256, 512),
        torch.optim.SGD,
    ),
}


def peaks():
    """Map each name to each GPU's peak bytes in a training step, beyond those held before."""
    return {
        name: _peak(gpus, *parts)
        for name, (gpus, *parts) in STEPS.items()
        if gpus <= torch.cuda.device_count()
    }


def _peak(gpus, make_model, make_input, kind):
    before = [torch.cuda.memory_allocated(gpu) for gpu in range(gpus)]
    model, batch = make_model().cuda(), make_input().cuda()
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(2):  # the first step creates the gradients and the optimizer's state
        for gpu in range(gpus):
            torch.cuda.synchronize(gpu)
            torch.cuda.reset_peak_memory_stats(gpu)
        optimizer.zero_grad()
        model(batch).float().pow(2).mean().backward()
        optimizer.step()
    return [torch.cuda.max_memory_allocated(gpu) - before[gpu] for gpu in range(gpus)]


def work():
    """Map each name to a function without arguments that runs on GPU 0."""
    square = {n: torch.ones(n, n, device="cuda:0") for n in (256, 1024, 2048)}
    half = {n: x.bfloat16() for n, x in square.items()}
    vector = {size: torch.ones(size // 4, device="cuda:0") for size in (64 * KIB, 64 * MIB)}
    host = torch.ones(64 * MIB // 4)
    pinned = host.pin_memory()
    images = torch.ones(256, 1, 28, 28, device="cuda:0")
    convolution = nn.Conv2d(1, 64, 3, padding=1).cuda()
    jobs = {
        **{f"float32 matmul, {n}": lambda x=x: x @ x for n, x in square.items()},
        **{f"bfloat16 matmul, {n}": lambda x=x: x @ x for n, x in half.items()},
        **{f"add, {s // KIB} KiB": lambda x=x: x + 1 for s, x in vector.items()},
        "sum, 64 MiB": lambda: vector[64 * MIB].sum(),
        "copy to the GPU, pinned, 64 MiB": lambda: pinned.to("cuda:0", non_blocking=True),
        "100 small additions": lambda: [vector[64 * KIB] + 1 for _ in range(100)],
        "convolution of 256 images": lambda: convolution(images),
    }
    if torch.cuda.device_count() > 1:
        source = vector[64 * MIB]
        jobs["copy to the next GPU, 64 MiB"] = lambda: source.to("cuda:1")
    return jobs


def times():
    """Map each name to seconds between two events: on real GPUs, the median of 20 after warm-up."""
    # In a recording, events are in virtual time, which doesn't vary.
    virtual = vgpu.is_enabled()
    uncounted, counted = (0, 1) if virtual else (3, 20)
    with torch.no_grad(), vgpu.record() if virtual else nullcontext():
        return {
            name: statistics.median([_seconds(job) for _ in range(uncounted + counted)][uncounted:])
            for name, job in work().items()
        }


def _seconds(job):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    job()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def hardware():
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
    }


def main():
    torch.manual_seed(0)
    found = {"hardware": hardware(), "errors": errors(), "peaks": peaks(), "times": times()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
