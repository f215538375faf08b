"""Time a two-rank training step on one virtual GPU per rank, compared with CPU tensors over gloo.

Each rank has one thread. Every repeat takes a step each way, one after the other, so that load from
other programs affects both; the losses are compared in every repeat, and must be equal bit
for bit. ``python -m benchmarks vgpu_ranks`` writes the result to RESULTS.md.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vgpu import launch

RANKS = 2
REPEATS = 9
VOCABULARY, TOKENS, WIDTH, LAYERS = 4096, 128, 384, 6
AIM = 1.3

Step = Callable[[], torch.Tensor]


class GPT(nn.Module):
    """A decoder of the usual shape: pre-norm blocks, causal attention, 13.9 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(TOKENS, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model, a batch of 4 sequences, and the next token at each position."""
    tokens = torch.randint(VOCABULARY, (4, TOKENS + 1))
    return GPT(), tokens[:, :-1], tokens[:, 1:].flatten()


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return ResNet-50, a batch of 8 images, and their labels."""
    model = torchvision.models.resnet50()
    return model, torch.randn(8, 3, 128, 128), torch.randint(1000, (8,))


def ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (RANKS,))
    for part in model.children():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            for block in part:
                fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


CASES = {
    "DDP, ResNet-50": (resnet, ddp),
    "FSDP2, ResNet-50": (resnet, fsdp2),
    "DDP, GPT": (gpt, ddp),
    "FSDP2, GPT": (gpt, fsdp2),
}


def make_step(case: str, device: torch.device) -> Step:
    """Return a training step on a device, with the same model on every rank and a batch per rank."""
    make, wrap = CASES[case]
    torch.manual_seed(0)
    model, inputs, targets = make()
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.rand_like(inputs) if inputs.is_floating_point() else inputs.roll(dist.get_rank())
    inputs, targets = inputs.to(device), targets.to(device)
    model = wrap(model.to(device), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets)
        loss.backward()
        optimizer.step()
        return loss.detach().cpu()

    return step


def rank_times(rank: int, world_size: int, case: str) -> dict[str, list[float]]:
    """Return the seconds of every repeat, on the CPU and on the rank's virtual GPU."""
    torch.set_num_threads(1)
    devices = {"cpu": torch.device("cpu"), "vgpu": torch.device("vgpu", rank)}
    steps = {kind: make_step(case, device) for kind, device in devices.items()}
    times_s: dict[str, list[float]] = {kind: [] for kind in steps}
    for repeat in range(REPEATS + 1):
        losses = []
        for kind, step in steps.items():
            dist.barrier()
            begin_s = time.perf_counter()
            losses.append(step())
            dist.barrier()
            if repeat:  # the first repeat fills caches
                times_s[kind].append(time.perf_counter() - begin_s)
        assert torch.equal(*losses), (rank, repeat, losses)
    return times_s


def row(case: str) -> str:
    """Return a line of the table."""
    times_s = launch.run(rank_times, RANKS, case, gpu="V100", timeout_s=1800)[0]
    ratios = [one / other for one, other in zip(times_s["vgpu"], times_s["cpu"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cpu_s, vgpu_s = (statistics.median(times_s[kind]) for kind in ("cpu", "vgpu"))
    return f"| {case} | {cpu_s:.2f} | {vgpu_s:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def main() -> str:
    """Return the section of RESULTS.md."""
    return "\n".join(
        [
            "## A two-rank training step on virtual GPUs",
            "",
            "Two processes with one thread each take a step with one virtual GPU per rank and the "
            "same step on CPU tensors over gloo, in turn. ResNet-50 has 8 images of 128x128 per "
            f"rank; the GPT has {LAYERS} layers of width {WIDTH}, and 4 sequences of {TOKENS} "
            f"tokens per rank. Times are medians of {REPEATS} repeats; the ratio is the median of "
            "the ratios within each repeat, followed by their middle half (the aim is at most "
            f"{AIM}). Both compute the same losses in every repeat, bit for bit.",
            "",
            "| | CPU tensors, s | virtual GPUs, s | ratio | middle half |",
            "|---|---|---|---|---|",
            *map(row, CASES),
        ]
    )


if __name__ == "__main__":
    print(main())
