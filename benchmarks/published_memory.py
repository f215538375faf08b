"""Count bytes that others published: activations of Megatron-LM, and ZeRO's three stages.

Sources: Korthikanti et al., 2022, Reducing activation recomputation in large transformer models
(activations of the first stage; GiB); Rajbhandari et al., 2020, ZeRO (figure 1: 7.5 billion
parameters with Adam in mixed precision on 64 GPUs; GB are 10⁹ bytes).

Nothing is fitted. Activations are the bytes that a forward pass of two layers leaves allocated on a rank of
the tensor-parallel group, scaled to the layers that the schedule keeps on its first device, without
embedding and loss, as in the paper. For ZeRO, we count what is allocated after a step, including gradients;
the first two stages are written by hand, and the third is PyTorch's own fully_shard.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import vgpu
from vgpu.plan import schedules
from vgpu.plan.megatron_layers import SEQUENCE, GPTSizes, Layers, Recipe


class Row(NamedTuple):
    name: str
    sizes: GPTSizes
    micro_batch: int
    pipeline: int
    chunks: int
    micro_batches: int
    kept_gib: float  # without recomputation
    selective_gib: float  # sequence parallelism, and attention recomputed


ROWS = (
    Row("22", GPTSizes(48, 6144, 64), 4, 1, 1, 1, 59.25, 9.56),
    Row("175", GPTSizes(96, 12288, 96), 1, 8, 3, 64, 66.84, 12.35),
    Row("530", GPTSizes(105, 20480, 128), 1, 35, 3, 280, 114.02, 23.08),
    Row("1000", GPTSizes(128, 25600, 160), 1, 64, 1, 512, 131.25, 26.56),
)
TENSOR = 8


def activations_gib(row: Row, recompute: str, sequence_parallel: bool) -> float:
    """Return the peak of the activations that the first stage keeps."""
    if row.chunks > 1:
        schedule = schedules.interleaved(row.pipeline, row.micro_batches, row.chunks)
    else:
        schedule = schedules.one_forward_one_backward(row.pipeline, row.micro_batches)
    in_flight = schedules.peaks_in_flight(schedule)[0]
    layers = row.sizes.layers // (row.pipeline * row.chunks)
    one = _bytes_of_a_layer(row, recompute, sequence_parallel)
    return in_flight * layers * one / 2**30


def _bytes_of_a_layer(row: Row, recompute: str, sequence_parallel: bool) -> float:
    with vgpu.cluster(1, TENSOR, gpu="A100", memory_bytes=2**40), vgpu.shapes_only():
        recipe = Recipe(dist.group.WORLD, recompute, sequence_parallel)
        layers = Layers(row.sizes, 2, recipe).half().to("vgpu")
        rows = SEQUENCE // TENSOR if sequence_parallel else SEQUENCE
        size = (rows, row.micro_batch, row.sizes.width)
        hidden = torch.empty(size, device="vgpu", dtype=torch.float16, requires_grad=True)
        before = torch.vgpu.memory_allocated()
        made = layers(hidden)
        kept = torch.vgpu.memory_allocated() - before
        assert made.shape == hidden.shape
        return kept / 2


PARAMETERS, GPUS = 7_500_000_000, 64
STAGES = ("nothing", "optimizer state", "and gradients", "and parameters")
PUBLISHED_GB = (120.0, 31.4, 16.6, 1.9)


class Sum(nn.Module):
    """The sum of 60 linear layers with the same input, with 7.5 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(15_625, 8_000, bias=False) for _ in range(60))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.parts)


def zero_bytes(stage: int) -> int:
    """Return the bytes that one rank of 64 has allocated after a step with ZeRO's stage 0 to 3."""
    with vgpu.cluster(GPUS // 8, gpu="A100", memory_bytes=2**38), vgpu.shapes_only():
        model = Sum().half().to("vgpu")
        assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
        if stage == 3:
            for part in (*model.parts, model):
                fully_shard(part)
        adam = _Adam(list(model.parameters()), stage)
        model(torch.empty(1, 15_625, device="vgpu", dtype=torch.float16)).sum().backward()
        adam.step()
        return torch.vgpu.memory_allocated()


class _Adam:
    """Adam on float32 copies of the parameters; from stage 1 on, of each rank's own part."""

    def __init__(self, parameters: list[nn.Parameter], stage: int) -> None:
        self._parameters = parameters
        self._cuts = stage in (1, 2)
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._copies = [nn.Parameter(self._part(p.detach()).float()) for p in parameters]
        self._adam = torch.optim.AdamW(self._copies, fused=True)
        hooked = parameters if stage == 2 else []
        self._hooks = [p.register_post_accumulate_grad_hook(self._scatter) for p in hooked]

    def _part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the values; in stage 3, each rank holds only its part anyway."""
        values = getattr(values, "to_local", lambda: values)()
        return values.flatten().chunk(GPUS)[dist.get_rank()] if self._cuts else values

    def _scatter(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        part = gradient.new_empty(gradient.numel() // GPUS)
        dist.reduce_scatter_single(part, gradient.flatten())
        self._gradients[parameter] = part
        parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step. The float16 gradients stay; the float32 ones are freed after the update."""
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            gradient = self._gradients.get(parameter)
            if gradient is None:
                assert parameter.grad is not None
                gradient = self._part(parameter.grad)
            copy.grad = gradient.float()
        self._adam.step()
        self._adam.zero_grad()
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            if self._cuts:
                dist.all_gather_single(parameter.flatten(), copy.half())
            else:
                self._part(parameter).copy_(copy)
        for hook in self._hooks:  # the hooks and the parameters refer to each other
            hook.remove()


def main() -> str:
    lines = [
        "## Published bytes, counted",
        "",
        "The first table gives the first stage's activations in GiB (Korthikanti et al., 2022), without "
        "recomputation, and with sequence parallelism and selective recomputation. Nothing is fitted.",
        "",
        "| parameters, 10⁹ | without recomputation, published | counted | error "
        "| selective, published | counted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        cells = []
        for published, how in (
            (row.kept_gib, ("none", False)),
            (row.selective_gib, ("selective", True)),
        ):
            found = activations_gib(row, *how)
            cells += [f"{published}", f"{found:.2f}", f"{found / published - 1:+.1%}"]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "The second table gives the GB that 7.5 billion parameters take on each of 64 GPUs (ZeRO, "
        "Rajbhandari et al., 2020).",
        "",
        "| sharded | published | counted |",
        "|---|---|---|",
    ]
    for stage, published in enumerate(PUBLISHED_GB):
        lines.append(f"| {STAGES[stage]} | {published} | {zero_bytes(stage) / 1e9:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
