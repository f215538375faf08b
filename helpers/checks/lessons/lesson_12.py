"""Checks for lesson 12: the ZeRO-1 step, sharding, hiding a gather, a checkpoint, units."""

import gc
import random
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import vgpu
from helpers.checks.core import Wrong, exercise, expect_number, for_input, hint_by_value
from helpers.checks.on_ranks import on_ranks
from vgpu.profiling import CollectiveCounter, CollectiveObserver, count_collectives_on_gpu, own_gpu
from vgpu.units import format_bytes

_RANKS = 4
_STEPS = 2


@exercise("12.1", "The ZeRO-1 step")
def zero1_step(answer: Callable[..., None]) -> dict[str, str]:
    # The second size isn't divisible by the number of ranks.
    layers = (random.randint(2, 5) * 4, random.randint(1, 4) * 4 + 1)
    net = nn.Sequential(nn.Linear(8, layers[0]), nn.Tanh(), nn.Linear(layers[0], layers[1]))
    batches = [
        (torch.randn(2 * _RANKS, 8), torch.randn(2 * _RANKS, layers[1])) for _ in range(_STEPS)
    ]
    expected = _alone(net, batches)
    given = f"layers 8 → {layers[0]} → {layers[1]} on {_RANKS} ranks, {_STEPS} steps"
    with for_input(given, "Average the gradients, update the shards, then gather the parameters."):
        results = on_ranks(
            _zero1_on_rank, _RANKS, answer, net.state_dict(), layers, batches, given=given
        )
        sizes = [parameter.numel() for parameter in net.parameters()]
        for rank, (steps, (kept, calls)) in enumerate(results):
            for step, (yours, wanted) in enumerate(zip(steps, expected, strict=True), 1):
                if not torch.allclose(yours, wanted, rtol=0, atol=1e-5):
                    raise Wrong(
                        yours=yours,
                        expected=wanted,
                        given=f"{given}: the parameters on rank {rank} after step {step}",
                        hint=_zero1_hint(yours, wanted, _before(net, expected, step), calls),
                    )
            if kept:
                raise Wrong(
                    yours=f"{kept} gradients still set on rank {rank}",
                    expected="no parameter has a gradient",
                    hint="The next backward adds to what's left in .grad: set it to None.",
                )
            _judge_collectives(calls, sizes, rank)
    names = [name for name, _ in results[0][1][1]]
    pairs = [pair for steps, _ in results for pair in zip(steps, expected, strict=True)]
    apart = max((yours - wanted).abs().max().item() for yours, wanted in pairs)
    return {
        "collectives per step": f"{names.count('reduce_scatter') // _STEPS} reduce-scatters and "
        f"{names.count('all_gather') // _STEPS} all-gathers for {len(sizes)} parameters",
        "differs from one process by": f"{apart:.0e}",
    }


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _flat(parameters: Any) -> torch.Tensor:
    return nn.utils.parameters_to_vector(parameters).detach().cpu()


def _before(net: nn.Module, expected: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    return expected[step - 2] if step > 1 else _flat(net.parameters())


def _alone(net: nn.Module, batches: Sequence[Any]) -> list[torch.Tensor]:
    """Return one process's parameters after each step on the full batch; ``net`` isn't changed."""
    state = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer, after = _optimizer(net.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        after.append(_flat(net.parameters()))
    net.load_state_dict(state)
    return after


def _zero1_on_rank(
    rank: int,
    world_size: int,
    answer: Callable[..., None],
    state: dict[str, torch.Tensor],
    layers: tuple[int, int],
    batches: Sequence[Any],
) -> tuple[list[torch.Tensor], tuple[int, list[tuple[str, int]]]]:
    gpu = own_gpu()
    net = nn.Sequential(nn.Linear(8, layers[0]), nn.Tanh(), nn.Linear(layers[0], layers[1]))
    net.load_state_dict(state)
    parameters = list(net.to(gpu).parameters())
    shards = [nn.Parameter(_part(parameter, rank, world_size)) for parameter in parameters]
    optimizer, after, kept = _optimizer(shards), [], 0
    calls: list[tuple[str, int]] = []
    for x, y in batches:
        own = slice(rank, None, world_size)
        F.mse_loss(net(x[own].to(gpu)), y[own].to(gpu)).backward()
        _, called = count_collectives_on_gpu(
            rank, world_size, lambda *_: answer(parameters, shards, optimizer)
        )
        calls += called
        after.append(_flat(parameters))
        kept = sum(parameter.grad is not None for parameter in parameters)
        for parameter in parameters:
            parameter.grad = None
    return after, (kept, calls)


def _part(parameter: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    row = F.pad(parameter.detach().flatten(), (0, -parameter.numel() % world_size))
    return row.chunk(world_size)[rank].clone()


def _zero1_hint(
    yours: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor, calls: Sequence[Any]
) -> str:
    names = {name for name, _ in calls}
    if torch.equal(yours, before):
        return (
            "The parameters haven't changed. Step the optimizer once the shards have their "
            "gradients, then write the gathered tensors into parameter.data."
        )
    if "all_gather" not in names:
        return "Each rank has updated only its own parts. Get the other parts from an all-gather."
    ratio = ((yours - before).norm() / (wanted - before).norm()).item()
    if abs(ratio - _RANKS) < 0.05:
        return f"The step is {_RANKS} times too large: you used the ranks' sum, not their average."
    if abs(ratio - 1 / _RANKS) < 0.05 / _RANKS:
        return f"The step is {_RANKS} times too small: don't divide again after averaged_part."
    if not names & {"reduce_scatter", "all_reduce"}:
        return "Each rank has used only its own gradient. All ranks' gradients must be averaged."
    return f"The step is {ratio:.2f} times as large as the right one."


def _judge_collectives(calls: Sequence[tuple[str, int]], sizes: Sequence[int], rank: int) -> None:
    allowed = {"reduce_scatter": len(sizes) * _STEPS, "all_gather": len(sizes) * _STEPS}
    names = [name for name, _ in calls]
    for name in sorted(set(names)):
        if names.count(name) > allowed.get(name, 0):
            raise Wrong(
                yours=f"{names.count(name)} {name} calls on rank {rank}",
                expected=f"at most {allowed.get(name, 0)} in {_STEPS} steps",
                hint=(
                    "An all-reduce does both halves, but a rank needs only a quarter of the sum. "
                    if name == "all_reduce"
                    else ""
                )
                + "Call averaged_part and gathered once per parameter.",
            )


@exercise("12.2", "Shard this model")
def shard_this_model(answer: Callable[[nn.Module, torch.device], Any]) -> dict[str, str]:
    layers = 10  # with more, an embedding or a head without its own unit matters less
    given = f"a model with {layers} layers on {_GPUS} virtual GPUs"
    with for_input(given, "Shard the model, allocate it on gpu, and return the optimizer."):
        with vgpu.cluster(1, _GPUS, "H100") as cluster, vgpu.shapes_only():
            with torch.device("meta"):
                model = _Stack(layers)
            count = sum(parameter.numel() for parameter in model.parameters())
            with vgpu.record_memory() as prepared:
                optimizer = answer(model, cluster.device)
            _judge_sharded(model, optimizer)
            _train_step(model, optimizer, cluster.device)  # Adam creates its state
            gc.collect()  # frees what that step left in reference cycles
            with vgpu.record_memory() as stepped, CollectiveCounter() as sent:
                _train_step(model, optimizer, cluster.device)
            before, during = (
                record.peak_bytes(cluster.device) / count for record in (prepared, stepped)
            )
            units = [part for part in model.modules() if isinstance(part, FSDPModule)]
        if max(before, during) > _MOST_BYTES:
            raise Wrong(
                yours=f"{max(before, during):.1f} bytes per parameter at the peak",
                expected=f"at most {_MOST_BYTES}",
                hint=_peak_hint(model, len(units), before > during),
            )
        gathers, most = sent.names.count("all_gather"), 2 * (layers + 3)
        if gathers > most:
            raise Wrong(
                yours=f"{gathers} all-gathers in a step",
                expected=f"at most {most}: two for each part",
                hint="The units are too small, and so are the messages. Wrap a layer as a whole.",
            )
    return {
        "peak": f"{during:.1f} bytes per parameter; with DDP, it's more than 16",
        "all-gathers in a step": f"{gathers} for {len(units)} units",
    }


_GPUS, _MOST_BYTES = 8, 3.5


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class _Stack(nn.Module):
    """A stack of layers whose embedding and head are each as large as a layer."""

    def __init__(self, layers: int, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8 * width, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8 * width, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (T,) -> (T, V)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _train_step(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    tokens = torch.zeros(8, dtype=torch.int64, device=device)
    F.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _judge_sharded(model: nn.Module, optimizer: Any) -> None:
    named = dict(model.named_parameters())
    whole = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
    if whole:
        raise Wrong(
            yours=f"{len(whole)} of {len(named)} parameters aren't sharded, such as {whole[-1]}",
            expected="every parameter sharded",
            hint="Call fully_shard on each part first, then on the model for the remaining parameters.",
        )
    if any(parameter.device.type == "meta" for parameter in named.values()):
        raise Wrong(
            yours="parameters on the meta device, which has no storage",
            expected="parameters on the GPU",
            hint="After sharding, model.to_empty(device=gpu) allocates this rank's slices.",
        )
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise Wrong(
            yours=optimizer,
            expected="torch.optim.Adam(model.parameters(), fused=True)",
            values=True,
        )
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if held != {id(parameter) for parameter in named.values()}:
        raise Wrong(
            yours="an optimizer whose parameters aren't the model's",
            expected="an optimizer with the model's sharded parameters",
            hint="fully_shard replaces the parameters. An optimizer created earlier holds the old "
            "ones, and would train nothing, without an error: create it last.",
        )


def _peak_hint(model: nn.Module, units: int, in_preparation: bool) -> str:
    if in_preparation:
        return (
            "The whole model was on the GPU before it was sharded. Shard it while it's still on the "
            "meta device; to_empty then allocates only slices."
        )
    if units == 1:
        return (
            "The model is a single unit: forward gathers all of it at once, and backward computes "
            "all gradients before it reduces any. Call fully_shard on each part first."
        )
    if not isinstance(model, FSDPModule):
        return (
            "Without a call on the model itself, every unit is its own root, and a root stays "
            "gathered after forward. Call fully_shard(model) last."
        )
    if not (isinstance(model.embedding, FSDPModule) and isinstance(model.head, FSDPModule)):
        return (
            "Parameters without their own unit are in the model's unit, which stays gathered from "
            "forward to the end of backward: here, that's the embedding or the head."
        )
    return "Too much is gathered at once. Are the units small, and are they freed after forward?"


@exercise("12.3", "Which batch size hides the gather")
def which_batch(answer: Callable[[int, float, float], float]) -> dict[str, str]:
    machines = [(8, 0.5 * 989e12, 0.8 * 450e9)]
    for gpus in random.choices((2, 4, 16, 64), k=4):
        machines.append((gpus, random.uniform(20, 900) * 1e12, random.uniform(5, 500) * 1e9))
    shown = {}
    for gpus, flop_per_s, bytes_per_s in machines:
        given = f"{gpus} GPUs, {flop_per_s / 1e12:.0f} TFLOP/s, {bytes_per_s / 1e9:.0f} GB/s"
        with for_input(given, "Return the number of tokens as one number."):
            yours = answer(gpus, flop_per_s, bytes_per_s)
            expect_number(yours, "a number of tokens")
            # Two bytes per parameter, and two operations per parameter and token: the twos cancel.
            wanted = (gpus - 1) / gpus * flop_per_s / bytes_per_s
            # Also accept the number rounded up to a whole token.
            if not abs(yours - wanted) <= max(0.01 * wanted, 1):
                raise Wrong(
                    yours=f"{yours:,.1f} tokens",
                    expected=f"{wanted:,.1f} tokens",
                    hint=_tokens_hint(yours / wanted, gpus),
                )
        shown[given] = f"{yours:,.0f} tokens per GPU"
    return shown


def _tokens_hint(ratio: float, gpus: int) -> str:
    ratios = {
        "Twice as many as needed. A bfloat16 parameter takes 2 bytes, and a multiplication and an "
        "addition count as two operations.": 2.0,
        "Half the right number. A bfloat16 parameter takes 2 bytes.": 0.5,
        "A GPU already has its own part: it receives (gpus - 1)/gpus of the layer.": gpus
        / (gpus - 1),
        "That's for the full step. Forward alone takes 2 operations per parameter and token.": 1
        / 3,
    }
    return hint_by_value(
        ratio,
        ratios,
        f"Yours is {ratio:.3g} times the right number. Set the time to gather (gpus - 1)/gpus x 2 "
        "bytes per parameter equal to the time to compute 2 operations per parameter and token.",
    )


@exercise("12.4", "Load four ranks' checkpoint on two")
def fill_from_checkpoint(answer: Callable[[Any, Path], None]) -> dict[str, str]:
    shown = {}
    width = random.randint(2, 6) * 4
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        for ranks in (4, 2):
            given = f"a checkpoint from 4 ranks, a model of width {width} on {ranks} ranks"
            with for_input(given, "Fill the model in place."):
                results = on_ranks(_fill_on_rank, ranks, answer, width, folder, given=given)
            for rank, (yours, untouched, saved, gathers) in enumerate(results):
                with for_input(f"{given}, rank {rank}"):
                    if not torch.equal(yours, saved):
                        raise Wrong(
                            yours=yours,
                            expected=saved,
                            hint="The model hasn't changed: dcp.load fills the tensors of the "
                            "dictionary that you pass. Are they the model's own?"
                            if torch.equal(yours, untouched)
                            else "The values differ from the checkpoint's.",
                        )
                    if gathers:
                        raise Wrong(
                            yours=f"{gathers} parameter all-gathers on rank {rank}",
                            expected="none: each rank reads only its own slices from the files",
                            hint="full_tensor() and full_state_dict=True gather the whole model.",
                        )
            shown[f"{ranks} ranks"] = f"{saved.numel()} parameters match, none gathered"
    return shown


def _sharded(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).to(own_gpu())
    fully_shard(net)
    return net


def _whole(net: nn.Module) -> torch.Tensor:
    parameters: Any = net.parameters()
    return torch.cat([parameter.full_tensor().detach().flatten().cpu() for parameter in parameters])


class _GathersOfParameters(CollectiveObserver):
    """Count all-gathers of parameters.

    All-gathers of Python objects, such as a checkpoint's plans, send bytes and don't count.
    """

    count = 0

    def see(self, call: Any) -> None:
        if "gather" in call.name:
            self.count += any(tensor.is_floating_point() for tensor in call.inputs)


def _fill_on_rank(
    rank: int, world_size: int, answer: Callable[[Any, Path], None], width: int, folder: Path
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return the parameters after and before the answer, the saved ones, and the gathers.

    Four ranks first save a checkpoint; two load that one.
    """
    other = _sharded(width, seed=0)
    if world_size == 4:
        dcp.save({"model": get_model_state_dict(other)}, checkpoint_id=folder)
    net = _sharded(width, seed=1)
    before = _whole(net)
    with _GathersOfParameters() as gathered:
        try:
            answer(net, folder)
        except CheckpointException as error:  # its own message names only the ranks
            reasons = {str(reason) for reason, _ in error.failures.values()}
            raise ValueError("; ".join(sorted(reasons))) from error
    return _whole(net), before, _whole(other), gathered.count


@exercise("12.5", "The fewest units")
def fewest_units(answer: Callable[[list[int], int], Any]) -> dict[str, str]:
    mib = 2**20
    shown = {}
    for number in range(8):
        count = (1, 4, 4, 4)[number] if number < 4 else random.randint(5, 9)
        layers = [(5 if number == 3 else random.randint(1, 9)) * mib for _ in range(count)]
        every = [
            [b - a for a, b in pairwise([0, *places, count])]
            for cuts in range(count)
            for places in combinations(range(1, count), cuts)
        ]
        least, most = _gathered_at_once(layers, every[-1]), sum(layers)
        # In case 1, the budget is too small for any choice; in case 2, it's enough for a single
        # unit; in case 3, it's just enough for one unit per layer; the others are in between.
        budget = {1: least - mib, 2: most, 3: least}.get(
            number, random.randint(least // mib, most // mib) * mib
        )
        fits = [choice for choice in every if _gathered_at_once(layers, choice) <= budget]
        given = f"layers of {[size // mib for size in layers]} MiB, budget {format_bytes(budget)}"
        with for_input(given, "Return the sizes of the units, or None."):
            yours = answer(list(layers), budget)
            if not fits and yours is not None:
                hint = (
                    f"Even with one layer per unit, neighbors take {format_bytes(least)}: too much."
                )
                raise Wrong(yours=repr(yours), expected="None", hint=hint)
            if fits:
                _judge_units(yours, layers, budget, fits)
                shown[given] = (
                    f"{yours}: {format_bytes(_gathered_at_once(layers, yours))} gathered at once, "
                    f"in {len(yours)} {'unit' if len(yours) == 1 else 'units'}"
                )
    return shown


def _gathered_at_once(layers: Sequence[int], units: Sequence[int]) -> int:
    """Return the most bytes gathered at once: a unit and the next one."""
    ends = [0, *accumulate(units)]
    sizes = [sum(layers[a:b]) for a, b in pairwise(ends)]
    return max([*sizes, *(a + b for a, b in pairwise(sizes))])


def _judge_units(
    yours: Any, layers: Sequence[int], budget: int, fits: Sequence[Sequence[int]]
) -> None:
    fewest = min(map(len, fits))
    best = next(choice for choice in fits if len(choice) == fewest)
    as_best = f"{best}: {format_bytes(_gathered_at_once(layers, best))} at once"
    if yours is None:
        hint = "There is a choice that fits: make more units."
        raise Wrong(yours="None", expected=as_best, hint=hint)
    whole = isinstance(yours, list | tuple) and all(type(n) is int and n > 0 for n in yours)
    if not whole or sum(yours) != len(layers):
        raise Wrong(
            yours=repr(yours),
            expected=f"positive integers that add up to {len(layers)}, such as {best}",
            hint="Each layer belongs to exactly one unit, in order.",
        )
    at_once = _gathered_at_once(layers, yours)
    if at_once > budget:
        raise Wrong(
            yours=f"{list(yours)}: {format_bytes(at_once)} at once",
            expected=as_best,
            hint="Over budget. While a unit computes, the next is gathered: add up neighbors.",
        )
    if len(yours) > fewest:
        raise Wrong(
            yours=f"{list(yours)}: {len(yours)} units",
            expected=f"{fewest} units, such as {as_best}",
            hint="It fits, but so does a choice with fewer gathers.",
        )
