"""Megatron-LM's training runs of 2021: one layer timed on a rank, and a schedule simulated.

Narayanan et al., 2021, Efficient large-scale language model training on GPU clusters: hosts of 8 A100
with 80 GB, NVLink 3, and eight 200 Gb/s InfiniBand adapters; float16, sequence 2048.

A layer, the embedding, the loss and the optimizer's step are recorded as one rank of the tensor
parallel group, elementwise chains fused as Megatron-LM's kernels are. The stages run the schedules of
``vgpu.plan.schedules``. A stage that sends waits until it has arrived, as Megatron-LM of 2021 does,
over all adapters of the host at once (4.1 there). Behind it come the all-reduce of gradients, which
nothing hides, and the optimizer.

The layers are those of NVIDIA/Megatron-LM as of that paper and of Korthikanti et al., 2022. Activations
are (sequence, micro-batch, width), so that heads are views; queries, keys and values come from one
product; the mask is part of the softmax kernel and costs nothing here; dropout of 0.1 after softmax
and after both halves of a layer. With sequence parallelism a column product keeps its own part of the
input, and gathers the others' once more backward, beside the other product.

Not modelled: the all-reduce of the embedding's gradients between first and last stage, three
all-reduces of one number for each token in the loss, the time to make a batch, and products that are
slower than others because of their sizes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgpu
from vgpu.plan import schedules

VOCABULARY, SEQUENCE, DROPOUT = 51_200, 2048, 0.1


class GPTSizes(NamedTuple):
    layers: int
    width: int
    heads: int

    @property
    def parameters(self) -> int:
        """With biases, norms and positions (Narayanan et al., equation 2)."""
        h, layers = self.width, self.layers
        return 12 * layers * h * h + 13 * layers * h + (VOCABULARY + SEQUENCE) * h


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a layer is split, and what of it is computed again."""

    group: dist.ProcessGroup  # the ranks that share each tensor
    recompute: str = "full"  # or "selective", for attention only, or "none"
    sequence_parallel: bool = False
    beside: bool = True  # whether gradients are summed beside the next product (from 2022 on)

    @property
    def parts(self) -> int:
        return self.group.size()


# One rank of the tensor-parallel group


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    whole = part.new_empty(part.size(0) * group.size(), *part.shape[1:])
    return whole, dist.all_gather_single(whole, part, group, async_op=True)


def _scattered(whole: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    part = whole.new_empty(whole.size(0) // group.size(), *whole.shape[1:])
    return part, dist.reduce_scatter_single(part, whole, group=group, async_op=True)


class _Columns(torch.autograd.Function):
    """A product whose result is split: what is gathered before it is not kept."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, recipe):
        ctx.save_for_backward(hidden, weight)
        ctx.recipe = recipe
        if recipe.sequence_parallel:
            hidden, gathering = _gathered(hidden, recipe.group)
            gathering.wait()
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        recipe, sending = ctx.recipe, None
        if recipe.sequence_parallel:
            hidden, gathering = _gathered(hidden, recipe.group)
        of_input = gradient @ weight
        if recipe.sequence_parallel:
            gathering.wait()
            of_input, sending = _scattered(of_input, recipe.group)
        elif recipe.parts > 1:
            sending = dist.all_reduce(of_input, group=recipe.group, async_op=True)
            if not recipe.beside:
                sending.wait()
        rows = gradient.flatten(0, 1)
        of_weight, of_bias = rows.t() @ hidden.flatten(0, 1), rows.sum(0)
        if sending is not None:
            sending.wait()
        return of_input, of_weight, of_bias, None


class _Summed(torch.autograd.Function):
    """The sum of all parts, or with sequence parallelism a part of the sum."""

    @staticmethod
    def forward(ctx, hidden, recipe):
        ctx.recipe = recipe
        if recipe.sequence_parallel:
            hidden, sending = _scattered(hidden, recipe.group)
            sending.wait()
        elif recipe.parts > 1:
            dist.all_reduce(hidden, group=recipe.group)
        return hidden

    @staticmethod
    def backward(ctx, gradient):
        if ctx.recipe.sequence_parallel:
            gradient, gathering = _gathered(gradient, ctx.recipe.group)
            gathering.wait()
        return gradient, None


class Columns(nn.Module):
    """(S, B, inputs) to (S, B, outputs / t)."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(outputs // recipe.parts, inputs))
        self.bias = nn.Parameter(torch.empty(outputs // recipe.parts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Columns.apply(hidden, self.weight, self.bias, self.recipe)


class Rows(nn.Module):
    """(S, B, inputs / t) to (S, B, outputs)."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(outputs, inputs // recipe.parts))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(F.linear(hidden, self.weight), self.recipe) + self.bias


class Attention(nn.Module):
    """(S, B, width) in and out; a rank has its part of the heads."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.recompute = recipe.recompute
        self.heads_in = Columns(sizes.width, 3 * sizes.width, recipe)
        self.output = Rows(sizes.width, sizes.width, recipe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.heads_in(hidden)  # (S, B, 3 width / t)
        length, batch = mixed.shape[:2]
        split = mixed.view(length, -1, 3 * self.head_width)  # (S, B heads / t, 3 head_width)
        parts = [part.transpose(0, 1) for part in split.chunk(3, -1)]
        again = self.recompute == "selective"
        seen = checkpoint(_seen, *parts, use_reentrant=False) if again else _seen(*parts)
        return self.output(seen.transpose(0, 1).reshape(length, batch, -1))


def _seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B heads, S, head_width) each, and out."""
    weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)  # scaled and masked in there
    return torch.bmm(F.dropout(weights, DROPOUT), value)


class Layer(nn.Module):
    """(S, B, width) in and out; with sequence parallelism, a rank's part of S."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, recipe)
        self.feed_forward_norm = nn.LayerNorm(sizes.width)
        self.up = Columns(sizes.width, 4 * sizes.width, recipe)
        self.down = Rows(4 * sizes.width, sizes.width, recipe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.attention(self.attention_norm(hidden))
        hidden = hidden + F.dropout(seen, DROPOUT)
        fed = self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))
        return hidden + F.dropout(fed, DROPOUT)


class Layers(nn.Module):
    """(S, B, width) in and out, or a rank's part of S."""

    def __init__(self, sizes: GPTSizes, count: int, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute
        self.layers = nn.ModuleList(Layer(sizes, recipe) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            again = self.recompute == "full"
            hidden = checkpoint(layer, hidden, use_reentrant=False) if again else layer(hidden)
        return hidden


class Embedding(nn.Module):
    """(S, B) tokens in, (S, B, width) out, or a rank's part of S."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.tokens = nn.Embedding(VOCABULARY // recipe.parts, sizes.width)
        self.positions = nn.Embedding(SEQUENCE, sizes.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = _Summed.apply(self.tokens(tokens), self.recipe)
        positions = torch.zeros_like(tokens[: hidden.size(0)])
        return F.dropout(hidden + self.positions(positions), DROPOUT)


class Loss(nn.Module):
    """The last norm, the product with the vocabulary, and the loss of a rank's part of it."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.output = Columns(sizes.width, VOCABULARY, recipe)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.norm(hidden))  # (S, B, vocabulary / t)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


# Trainings

GPU = dataclasses.replace(
    vgpu.get_spec("A100"),
    name="Virtual A100-SXM4-80GB",
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_per_s=2039e9,
    source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM column",
)
NETWORK = "InfiniBand HDR"
FULL, SELECTIVE = ("full", False), ("selective", True)


class Run(NamedTuple):
    """A training: how it is laid out, and what of a layer is computed again."""

    sizes: GPTSizes
    tp: int
    pp: int
    chunks: int
    gpus: int
    batch: int
    micro_batch: int
    kept: tuple[str, bool] = FULL  # what is recomputed, and whether split along the sequence
    beside: bool = False  # whether gradients are summed beside the next product

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.dp * self.micro_batch)

    @property
    def layout(self) -> str:
        chunks = f" ({self.chunks})" if self.chunks > 1 else ""
        return f"{self.tp} × {self.pp}{chunks}, {self.batch}/{self.micro_batch}"

    @property
    def flop(self) -> float:
        """Of a step, by the papers' formulas, with what is computed again."""
        h, layers = self.sizes.width, self.sizes.layers
        tokens = self.batch * SEQUENCE
        if self.kept == FULL:
            return (
                96
                * tokens
                * layers
                * h
                * h
                * (1 + SEQUENCE / (6 * h) + VOCABULARY / (16 * layers * h))
            )
        return (
            72
            * tokens
            * layers
            * h
            * h
            * (1 + SEQUENCE / (4.5 * h) + VOCABULARY / (12 * layers * h))
        )


class Published(NamedTuple):
    name: str
    run: Run
    tera: float  # FLOP/s of one GPU


ROWS = (
    Published("1.7", Run(GPTSizes(24, 2304, 24), 1, 1, 1, 32, 512, 16), 137),
    Published("3.6", Run(GPTSizes(30, 3072, 32), 2, 1, 1, 64, 512, 16), 138),
    Published("7.5", Run(GPTSizes(36, 4096, 32), 4, 1, 1, 128, 512, 16), 142),
    Published("18.4", Run(GPTSizes(40, 6144, 48), 8, 1, 1, 256, 1024, 8), 135),
    Published("39.1", Run(GPTSizes(48, 8192, 64), 8, 2, 1, 512, 1536, 4), 138),
    Published("76.1", Run(GPTSizes(60, 10240, 80), 8, 4, 3, 1024, 1792, 2), 140),
    Published("145.6", Run(GPTSizes(80, 12288, 96), 8, 8, 2, 1536, 2304, 2), 148),
    Published("310.1", Run(GPTSizes(96, 16384, 128), 8, 16, 2, 1920, 2160, 1), 155),
    Published("529.6", Run(GPTSizes(105, 20480, 128), 8, 35, 3, 2520, 2520, 1), 163),
    Published("1008", Run(GPTSizes(128, 25600, 160), 8, 64, 1, 3072, 3072, 1), 163),
)
FITTED = ROWS[0]


class RecordedParts(NamedTuple):
    """What one rank does: forward and backward of a micro-batch, and once a step."""

    layer: tuple[vgpu.Timeline, vgpu.Timeline]
    embedding: tuple[vgpu.Timeline, vgpu.Timeline]
    loss: tuple[vgpu.Timeline, vgpu.Timeline]
    optimizer: vgpu.Timeline
    gradient_bytes: int


@functools.cache
def recorded(run: Run) -> RecordedParts:
    """A rank of the first stage, which also has the loss where there is one stage."""
    sizes, rows = run.sizes, SEQUENCE // (run.tp if run.kept[1] else 1)
    with vgpu.cluster(1, run.tp, gpu=GPU, network=NETWORK), vgpu.shapes_only():
        world = dist.group.WORLD
        assert world is not None
        recipe = Recipe(world, *run.kept, run.beside)

        def hidden() -> torch.Tensor:
            size = (rows, run.micro_batch, sizes.width)
            return torch.empty(size, device="vgpu", dtype=torch.float16, requires_grad=True)

        def on_gpu(module: nn.Module) -> nn.Module:
            return module.half().to("vgpu")

        tokens = torch.zeros(SEQUENCE, run.micro_batch, dtype=torch.int64).to("vgpu")
        embedding, loss = on_gpu(Embedding(sizes, recipe)), on_gpu(Loss(sizes, recipe))
        per_stage = sizes.layers // run.pp
        stage = Layers(sizes, per_stage, recipe)
        on_gpu(stage)  # in place
        layer = Layers(sizes, 0, recipe)
        layer.layers.append(stage.layers[0])
        both = (
            _both_ways(layer, hidden()),
            _both_ways(embedding, tokens),
            _both_ways(loss, hidden(), tokens),
        )
        parameters = [*stage.parameters(), *embedding.parameters()]
        return RecordedParts(*both, _update(parameters), 2 * sum(p.numel() for p in parameters))


def _both_ways(module: nn.Module, *inputs: torch.Tensor) -> tuple[vgpu.Timeline, vgpu.Timeline]:
    """The second micro-batch, which adds to the gradients of the first."""

    def backward(output: torch.Tensor) -> None:
        output.backward(torch.empty_like(output) if output.dim() else None)

    backward(module(*inputs))
    with vgpu.record(fuses=True) as forwards:
        output = module(*inputs)
    with vgpu.record(fuses=True) as backwards:
        backward(output)
    assert not forwards.races and not backwards.races
    return forwards, backwards


def _update(parameters: list[nn.Parameter]) -> vgpu.Timeline:
    """Mixed precision: gradients are unscaled and clipped, and Adam updates a copy in float32."""
    copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    adam = torch.optim.AdamW(copies, fused=True)
    inverse_scale = torch.ones(1, device="vgpu")

    def update() -> None:
        for copy, parameter in zip(copies, parameters, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            copy.grad = gradient.float() * inverse_scale
        nn.utils.clip_grad_norm_(copies, 1.0, foreach=True)
        adam.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, parameters, strict=True):
                parameter.copy_(copy)

    update()  # which makes Adam's averages
    with vgpu.record(fuses=True) as timeline:
        update()
    return timeline


class Shares(NamedTuple):
    """Of the GPU's peaks, and how much GPUs differ in arithmetic (``CostModel.speed_spread``)."""

    arithmetic: float
    memory: float
    speed_spread: float = 0.0


def step_s(run: Run, shares: Shares) -> float:
    """Seconds of one step of the whole training."""
    parts = recorded(run)

    def again(timeline: vgpu.Timeline) -> float:
        again = vgpu.replay(
            timeline,
            arithmetic_share=shares.arithmetic,
            memory_share=shares.memory,
            speed_spread=shares.speed_spread,
            slowest_of=run.gpus,
        )
        return again.makespan_s

    layer, embedding, loss = (
        [again(timeline) for timeline in both]
        for both in (parts.layer, parts.embedding, parts.loss)
    )
    costs = vgpu.CostModel(GPU, network=vgpu.NETWORKS[NETWORK], gpus_per_host=8)
    per_stage, stages = run.sizes.layers // run.pp, run.pp * run.chunks
    sent_s = _transfer_s(run, costs) if run.pp > 1 else 0.0
    forward_s = per_stage * layer[0] + run.chunks * sent_s
    backward_s = per_stage * layer[1] + run.chunks * sent_s
    chunk_s = (forward_s + backward_s) / run.chunks
    longer = [1.0] * stages
    longer[0] += sum(embedding) / chunk_s
    longer[-1] += sum(loss) / chunk_s
    times = schedules.Times(forward_s, backward_s, 0.0, by_stage=longer)
    if run.chunks > 1:
        schedule = schedules.interleaved(run.pp, run.micro_batches, run.chunks)
    else:
        schedule = schedules.one_forward_one_backward(run.pp, run.micro_batches)
    ranks = range(0, run.dp * run.tp, run.tp)
    summed_s = costs.group_time_s("all_reduce", parts.gradient_bytes, ranks)
    return schedules.simulate(schedule, times).makespan + summed_s + again(parts.optimizer)


def _transfer_s(run: Run, costs: vgpu.CostModel) -> float:
    """Each rank sends its part to the next stage's host, where they are gathered."""
    whole_bytes = 2 * SEQUENCE * run.micro_batch * run.sizes.width
    part_s = costs.group_time_s("send", whole_bytes // run.tp, [0, 8])
    if run.kept[1]:
        return part_s  # activations are split along the sequence anyway
    return part_s + costs.group_time_s("all_gather", whole_bytes, range(run.tp))


def tera(run: Run, shares: Shares) -> float:
    """TFLOP/s of each GPU, as the papers count them."""
    return run.flop / run.gpus / step_s(run, shares) / 1e12


def fitted(run: Run, seconds: float, memory: float, speed_spread: float = 0.0) -> Shares:
    """The share of arithmetic at which the run takes so long."""

    def at(arithmetic: float) -> Shares:
        return Shares(arithmetic, memory, speed_spread)

    return at(vgpu.fit_share(lambda share: step_s(run, at(share)), seconds))


def seconds_at(run: Run, tera_flop_per_s: float) -> float:
    """Seconds of a step at so many TFLOP/s of each GPU."""
    return run.flop / run.gpus / tera_flop_per_s / 1e12
