"""Predicts Megatron-LM's step times from one layer, timed on one rank, and a simulated schedule.

Narayanan et al., 2021, Efficient large-scale language model training on GPU clusters: hosts with
eight 80 GB A100s, NVLink 3, and eight 200 Gb/s InfiniBand adapters; float16, sequence length 2048.
``Run`` also has options for later runs.

A layer (megatron_layers.py), the embedding, the loss and the optimizer's step are recorded on one
rank of the tensor-parallel group, with elementwise chains fused as in Megatron-LM's kernels. Each
part takes its GPU time, or more if its host time is about as long or longer: see ``CALL_S``. The
stages run the schedules of ``vgpu.plan.schedules``; the ranks of a tensor-parallel group are
neighbors, then come data-parallel ranks, then stages. A sending stage waits until the message has
arrived, as in Megatron-LM in 2021; a message uses all of the host's adapters at once (section 4.1
of the paper). Then come the exposed all-reduce of gradients and the optimizer's step;
``shards_optimizer`` and ``overlaps`` work as in Megatron-Core's distributed optimizer.

Matmuls whose tiles don't fill the GPU take longer, as in ``vgpu/time/costs.py``. Not modeled:
the all-reduce of the embedding's gradients between the first and last stage, and which algorithm
cuBLAS picks for a matmul's sizes.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import vgpu
from vgpu.plan import schedules
from vgpu.plan.megatron_layers import DROPOUT, Embedding, GPTSizes, Layers, Loss, Recipe

GPU = dataclasses.replace(
    vgpu.get_spec("A100"),
    name="Virtual A100-SXM4-80GB",
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_per_s=2039e9,
    source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM column",
)
NETWORK = "InfiniBand HDR"
FULL, SELECTIVE, NOTHING = ("full", False), ("selective", True), ("none", True)
GPUS_PER_HOST = 8
# The largest models' layers are also recorded undivided, to count their calls.
_NO_LIMIT_BYTES = 2**50

# Host seconds per kernel that a layer launches, including everything that Python does for it:
# modules, views, autograd's nodes, recomputation. On one core of an EPYC, one of these layers with
# tiny tensors on the CPU took 2.5 to 2.9 ms, forward and backward with full recomputation. On a
# GPU, it launches 60 kernels, and each launch takes about 4 µs more.
CALL_S = 50e-6
# Kernels per micro-batch in addition to those recorded: tokens, labels and masks are created and
# sent between ranks (get_batch in pretrain_gpt.py), the embedding masks other ranks' tokens, and
# losses are averaged.
BATCH_CALLS = 30


class Run(NamedTuple):
    """A training run: its layout, and what's recomputed in each layer."""

    sizes: GPTSizes
    tp: int
    pp: int
    chunks: int
    gpus: int
    batch: int
    micro_batch: int
    # What's recomputed, and whether activations are split along the sequence.
    kept: tuple[str, bool] = FULL
    beside: bool = False  # whether input gradients' all-reduces overlap with the next matmul
    flash: bool = False  # whether attention is one fused kernel
    dropout: float = DROPOUT
    shards_optimizer: bool = False  # across data-parallel ranks (ZeRO-1)
    # Whether gradient reductions overlap with backward, and parameter gathers with forward.
    overlaps: bool = False
    gradient_bytes: int = 2  # per element of a gradient, in the reduction
    gpu: vgpu.GPUSpec = GPU
    network: str = NETWORK

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
        """The FLOPs of a step with recomputation, counting all attention scores, as the papers do."""
        sizes, tokens = self.sizes, self.batch * self.sizes.sequence
        scores = 4 * sizes.sequence * sizes.width  # two matmuls, per token and layer
        layer = 2 * sizes.layer_products + scores
        again = {"full": layer, "selective": scores, "none": 0}[self.kept[0]]
        output = 2 * sizes.vocabulary * sizes.width
        return tokens * (sizes.layers * (3 * layer + again) + 3 * output)


class Published(NamedTuple):
    name: str
    run: Run
    tera: float  # TFLOP/s per GPU


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


class Recorded(NamedTuple):
    """A part of a model on one rank: a micro-batch's forward and backward, and the update."""

    forward: vgpu.Timeline
    backward: vgpu.Timeline
    update: vgpu.Timeline
    tensors: int  # the number of parameter tensors
    parameters: int


class RecordedParts(NamedTuple):
    layer: Recorded
    embedding: Recorded
    loss: Recorded


def recorded(run: Run) -> RecordedParts:
    """Record a rank's layer, embedding and loss, regardless of the number of layers and ranks."""
    return _recorded(
        run._replace(sizes=run.sizes._replace(layers=1), pp=1, chunks=1, gpus=run.tp, batch=1)
    )


@functools.cache
def _recorded(run: Run) -> RecordedParts:
    sizes, rows = run.sizes, run.sizes.sequence // (run.tp if run.kept[1] else 1)
    hosts = max(1, run.tp // GPUS_PER_HOST)
    with (
        vgpu.cluster(
            hosts,
            run.tp // hosts,
            gpu=run.gpu,
            network=run.network,
            memory_bytes=_NO_LIMIT_BYTES,
        ),
        vgpu.shapes_only(),
    ):
        world = dist.group.WORLD
        assert world is not None
        recipe = Recipe(world, *run.kept, run.beside, run.flash, run.dropout)

        def hidden() -> torch.Tensor:
            size = (rows, run.micro_batch, sizes.width)
            return torch.empty(size, device="vgpu", dtype=torch.float16, requires_grad=True)

        def on_gpu(module: nn.Module) -> nn.Module:
            return module.half().to("vgpu")

        size = (sizes.sequence, run.micro_batch)
        tokens = torch.zeros(size, dtype=torch.int64).to("vgpu")
        return RecordedParts(
            _both_ways(on_gpu(Layers(sizes, 1, recipe)), hidden()),
            _both_ways(on_gpu(Embedding(sizes, recipe)), tokens),
            _both_ways(on_gpu(Loss(sizes, recipe)), hidden(), tokens, fuses=False),
        )


def _both_ways(module: nn.Module, *inputs: torch.Tensor, fuses: bool = True) -> Recorded:
    """Record the second micro-batch, which accumulates into the first one's gradients."""

    def backward(output: torch.Tensor) -> None:
        output.backward(torch.empty_like(output) if output.dim() else None)

    backward(module(*inputs))
    with vgpu.record(fuses=fuses) as forwards:
        output = module(*inputs)
    with vgpu.record(fuses=fuses) as backwards:
        backward(output)
    assert not forwards.races and not backwards.races
    parameters = list(module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    return Recorded(forwards, backwards, _update(parameters), len(parameters), count)


def _update(parameters: list[nn.Parameter]) -> vgpu.Timeline:
    """Record an update in mixed precision.

    Gradients are unscaled and clipped, and Adam updates float32 copies of the parameters.
    """
    copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    adam = torch.optim.AdamW(copies, fused=True)
    inverse_scale = torch.ones(1, device="vgpu")

    def update() -> None:
        for copy, parameter in zip(copies, parameters, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float() * inverse_scale
        nn.utils.clip_grad_norm_(copies, 1.0, foreach=True)
        adam.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, parameters, strict=True):
                parameter.copy_(copy)

    update()  # creates Adam's moments
    with vgpu.record(fuses=True) as timeline:
        update()
    return timeline


class Shares(NamedTuple):
    """Shares of the GPU's peaks, and how much GPUs differ in speed (``CostModel.speed_spread``)."""

    arithmetic: float
    memory: float
    speed_spread: float = 0.0


def _check(run: Run) -> None:
    ranks, samples = run.tp * run.pp, run.dp * run.micro_batch
    if run.gpus % ranks:
        raise ValueError(f"{run.gpus} GPUs aren't divisible by TP {run.tp} × PP {run.pp}")
    if run.batch % samples:
        raise ValueError(
            f"a batch of {run.batch} can't be divided evenly into micro-batches of "
            f"{run.micro_batch} on each of {run.dp} data-parallel ranks"
        )
    if run.sizes.key_value_heads is not None and not run.flash:
        raise ValueError("grouped-query attention needs fused attention: pass flash=True")
    if run.tp > GPUS_PER_HOST and run.tp % GPUS_PER_HOST:
        raise ValueError(f"TP {run.tp} doesn't fill hosts of {GPUS_PER_HOST} GPUs")


class _Seconds(NamedTuple):
    forward: float
    backward: float
    update: float


def step_s(run: Run, shares: Shares) -> float:
    """Return the run's seconds per step."""
    _check(run)
    parts = recorded(run)
    layer, embedding, loss = (
        _seconds(part, whole, run, shares)
        for part, whole in zip(parts, recorded(run._replace(tp=1)), strict=True)
    )
    costs = vgpu.CostModel(run.gpu, network=vgpu.NETWORKS[run.network], gpus_per_host=GPUS_PER_HOST)
    per_stage, stages = run.sizes.layers // run.pp, run.pp * run.chunks
    sent_s = _transfer_s(run, costs) if run.pp > 1 else 0.0
    forward_s = per_stage * layer.forward + run.chunks * sent_s
    backward_s = per_stage * layer.backward + run.chunks * sent_s
    chunk_s = (forward_s + backward_s) / run.chunks
    batch_s = BATCH_CALLS * CALL_S
    longer = [1.0] * stages
    longer[0] += (embedding.forward + embedding.backward + batch_s) / chunk_s
    longer[-1] += (loss.forward + loss.backward) / chunk_s
    times = schedules.Times(forward_s, backward_s, 0.0, by_stage=longer)
    if run.chunks > 1:
        schedule = schedules.interleaved(run.pp, run.micro_batches, run.chunks)
    else:
        schedule = schedules.one_forward_one_backward(run.pp, run.micro_batches)
    parameters = per_stage * parts.layer.parameters + parts.embedding.parameters
    summed_s = _summed_s(run, costs, parameters, forward_s, backward_s)
    update_s = per_stage * layer.update + embedding.update
    if run.shards_optimizer:
        update_s /= run.dp
    return schedules.simulate(schedule, times).makespan + summed_s + update_s


def _seconds(part: Recorded, whole: Recorded, run: Run, shares: Shares) -> _Seconds:
    """Return the seconds of a part's forward, backward and update, on GPU and host together.

    ``whole`` is the same part without tensor parallelism. In Megatron-LM, it launches the same
    kernels as ``part``. In the recordings, ``part`` has a few more: collectives break up fused
    chains of elementwise operations, but Megatron-LM's own fused kernels have too few operations
    for that.
    """

    def beside_host(
        timeline: vgpu.Timeline, without_tp: vgpu.Timeline, call_s: float, more_calls: int = 0
    ) -> float:
        kernels = sum(event.kind == "kernel" for event in without_tp.events)
        collectives = sum(event.kind == "collective" for event in timeline.events)
        calls = kernels + collectives + more_calls
        again = vgpu.replay(
            timeline,
            arithmetic_share=shares.arithmetic,
            memory_share=shares.memory,
            speed_spread=shares.speed_spread,
            slowest_of=run.gpus,
            attention="flash 3" if run.gpu.compute_capability >= (9, 0) else "flash 2",
            python_launch_s=0.0,
            engine_launch_s=0.0,
        )
        return _beside(again.makespan_s, calls * call_s)

    python_s = vgpu.CostModel(run.gpu).python_launch_s
    # A separate kernel accumulates each gradient; in the recording, it's fused with others.
    return _Seconds(
        beside_host(part.forward, whole.forward, CALL_S),
        beside_host(part.backward, whole.backward, CALL_S, part.tensors),
        beside_host(part.update, whole.update, python_s),
    )


def _beside(gpu_s: float, host_s: float) -> float:
    """Return the combined time of GPU and host, which sometimes wait for each other.

    Neither fully hides the other, because calls and kernels vary, and the ranks of a
    tensor-parallel group wait for the last one. The result is the larger time if the two differ a
    lot and, by assumption, 26% more if they're equal.
    """
    return (gpu_s**3 + host_s**3) ** (1 / 3)


def _summed_s(
    run: Run, costs: vgpu.CostModel, parameters: int, forward_s: float, backward_s: float
) -> float:
    """Return the exposed seconds of gradient reductions and parameter gathers across dp ranks."""
    ranks = range(0, run.dp * run.tp, run.tp)
    gradients_bytes = run.gradient_bytes * parameters
    gathered_s = 0.0
    if run.shards_optimizer:
        summed_s = costs.group_time_s("reduce_scatter", gradients_bytes, ranks)
        gathered_s = costs.group_time_s("all_gather", 2 * parameters, ranks)
    else:
        summed_s = costs.group_time_s("all_reduce", gradients_bytes, ranks)
    if run.overlaps:  # with the last micro-batch's backward and the first one's forward
        return max(0.0, summed_s - backward_s) + max(0.0, gathered_s - forward_s)
    return summed_s + gathered_s


def _transfer_s(run: Run, costs: vgpu.CostModel) -> float:
    """Return the seconds to send each rank's part to the next stage and gather the parts there."""
    whole_bytes = 2 * run.sizes.sequence * run.micro_batch * run.sizes.width
    following = run.dp * run.tp  # rank 0's counterpart in the next stage
    if len(costs.hosts_of([0, following])) == 1:
        return costs.group_time_s("send", whole_bytes, [0, following])
    part_s = costs.group_time_s("send", whole_bytes // run.tp, [0, following])
    if run.kept[1]:
        return part_s  # activations stay split along the sequence
    return part_s + costs.group_time_s("all_gather", whole_bytes, range(run.tp))


def tera(run: Run, shares: Shares) -> float:
    """Return the TFLOP/s per GPU, as the papers count them."""
    return run.flop / run.gpus / step_s(run, shares) / 1e12


def fitted(run: Run, seconds: float, memory: float, speed_spread: float = 0.0) -> Shares:
    """Return the shares, with arithmetic fitted so that the run takes ``seconds`` per step."""

    def at(arithmetic: float) -> Shares:
        return Shares(arithmetic, memory, speed_spread)

    return at(vgpu.fit_share(lambda share: step_s(run, at(share)), seconds))


def seconds_at(run: Run, tera_flop_per_s: float) -> float:
    """Return the seconds per step at ``tera_flop_per_s`` TFLOP/s per GPU."""
    return run.flop / run.gpus / tera_flop_per_s / 1e12
