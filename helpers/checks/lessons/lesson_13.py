"""Checks for lesson 13: values, gradients and communication of splits, compared with one GPU."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import vgpu
from helpers.checks.core import Wrong, exercise, expect_close, for_input
from helpers.checks.on_ranks import on_ranks, run_backward
from vgpu.plan.transformer import Transformer, TransformerBlock, TransformerSizes, rotary_angles
from vgpu.profiling import CollectiveCounter, own_gpu
from vgpu.units import format_bytes, format_seconds

_A_FUNCTION = "put it into an autograd.Function that defines its backward, "


@exercise("13.1", "A Linear layer, split by rows")
def linear_split_by_rows(answer: Callable[..., Any]) -> dict[str, Any]:
    sent: dict[str, str] = {}
    for ranks in (2, 3):
        batch, inputs, outputs = random.randint(3, 6), ranks * random.randint(2, 5), 7
        x, weight = torch.randn(batch, inputs), torch.randn(outputs, inputs)
        bias, target = torch.randn(outputs), torch.randn(batch, outputs)

        # Inside the check, so that it's pickled by value: ranks don't have to import the checks.
        def split(
            rank: int, world_size: int, answer: Any, *tensors: torch.Tensor
        ) -> tuple[list[Any], list[Any], list[Any]]:
            x, weight, bias, target = (tensor.to(own_gpu()) for tensor in tensors)
            x, weight = (part.chunk(world_size, 1)[rank].clone() for part in (x, weight))
            leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
            with CollectiveCounter() as forward:
                output = answer(*leaves)
            if not isinstance(output, torch.Tensor) or output.shape != target.shape:
                return [torch.as_tensor(output).cpu()], forward.calls, []
            with CollectiveCounter() as backward:
                run_backward(
                    (output - target).square().sum(), instead=_A_FUNCTION + "as Enter does"
                )
            returned = [output.detach(), *(leaf.grad for leaf in leaves)]
            return [t if t is None else t.cpu() for t in returned], forward.calls, backward.calls

        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        whole = F.linear(*leaves)
        loss = (whole - target).square().sum()
        of_x, of_weight, of_bias = torch.autograd.grad(loss, leaves)
        given = f"{ranks} ranks, x of shape ({batch}, {inputs // ranks}) on each, {outputs} outputs"
        results = on_ranks(split, ranks, answer, x, weight, bias, target, given=given)
        for rank, (returned, forward, backward) in enumerate(results):
            with for_input(f"{given}; on rank {rank}"):
                parts = [gradient.chunk(ranks, 1)[rank] for gradient in (of_x, of_weight)]
                wanted = [whole.detach(), *parts, of_bias]
                expect_close(returned[0], wanted[0], hint=_hint_for_rows(returned[0], whole))
                names = ("x", "weight", "bias")
                for name, mine, right in zip(names, returned[1:], wanted[1:], strict=True):
                    hint = _hint_for_gradient(mine, right, ranks)
                    where = f"{given}; on rank {rank}, the gradient of {name}"
                    expect_close(mine, right, given=where, hint=hint)
                _expect_budget(forward, 1, 4 * batch * outputs, "forward")
                _expect_budget(backward, 0, 0, "backward")
        sent[f"{ranks} ranks"] = (
            f"output and gradients match; forward sends one all_reduce of {4 * batch * outputs} B, "
            "backward nothing"
        )
    return sent


def _hint_for_rows(yours: Any, whole: torch.Tensor) -> str:
    if not isinstance(yours, torch.Tensor):
        return "Return the output as a tensor, on every rank."
    if yours.shape != whole.shape:
        return "Return the full output, (B, O), on every rank."
    off = yours - whole.detach()
    if all(torch.allclose(row, off[0], atol=1e-4) for row in off):
        return "Only the bias is wrong: add it once, after the sum, not on each rank."
    return "Each rank's matmul gives one part of the sum: add up all ranks' parts."


def _hint_for_gradient(yours: Any, right: torch.Tensor, ranks: int) -> str:
    if yours is None:
        return "No gradient arrives here: the sum has no backward. Write one, like Enter's."
    if torch.allclose(yours, ranks * right, rtol=1e-3, atol=1e-4):
        return (
            f"{ranks} times too large: every rank already has the full gradient, so backward "
            "must not sum it over the ranks."
        )
    if torch.allclose(ranks * yours, right, rtol=1e-3, atol=1e-4):
        return f"{ranks} times too small: if forward divides by {ranks}, backward must, too."
    return "Every rank continues with the same output: pass its gradient back unchanged."


def _expect_budget(calls: list[tuple[str, int]], count: int, size_bytes: int, phase: str) -> None:
    """Raise ``Wrong`` unless ``calls`` are at most ``count`` all-reduces of ``size_bytes``."""
    spent = sum(size for _, size in calls)
    if (
        len(calls) > count
        or spent > count * size_bytes
        or any(name != "all_reduce" for name, _ in calls)
    ):
        budget = _in_words([("all_reduce", size_bytes)] * count)
        raise Wrong(
            yours=f"{phase} sends {_in_words(calls)}",
            expected=f"{phase} sends {budget}",
            hint="The results are right, but over budget.",
        )


def _in_words(calls: list[tuple[str, int]]) -> str:
    counts = Counter(calls)
    return ", ".join(f"{n} {name} of {size} B" for (name, size), n in counts.items()) or "nothing"


_SMALL = TransformerSizes(
    layers=1, width=32, heads=4, key_value_heads=2, feed_forward=48, vocabulary=1
)
_SMALL_GPT = dataclasses.replace(_SMALL, layers=2, vocabulary=10)


@exercise("13.2", "From fourteen to eight", callable_answer=False)
def from_fourteen_to_eight(answer: Any) -> dict[str, Any]:
    torch.manual_seed(random.randrange(2**31))
    model, tokens = Transformer(_SMALL_GPT), torch.randint(10, (2, 6))
    given = "a GPT with two layers, on 2 ranks"
    block = model.get_submodule("blocks.0")
    plan = _plan_in(answer, block, given, start="{**first_plan, ...}")
    matmuls = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    if lacking := [name for name in matmuls if not any(_matches(name, each) for each in plan)]:
        raise Wrong(
            yours=f"no entry for {', '.join(lacking)}",
            expected="an entry for each matmul",
            given=given,
            hint="first_plan splits them: keep its entries.",
        )
    of_blocks = {f"blocks.*.{name}": style for name, style in plan.items()}
    try:
        results = on_ranks(_beside_whole, 2, model, [tokens], of_blocks, given=given)
    except Wrong as wrong:
        wrong.hint = f"{_hint_for_error(wrong.yours)}\n{wrong.hint}"
        raise
    size_bytes = 4 * tokens.numel() * _SMALL_GPT.width
    for rank, (off, off_gradient, calls, _) in enumerate(results):
        with for_input(f"{given}; on rank {rank}"):
            if not (off <= 1e-4 and off_gradient <= 1e-4):
                raise Wrong(
                    yours=f"logits off by {off:.2g}, gradients by {off_gradient:.2g}",
                    expected="the logits and gradients of one GPU",
                    hint="An input is declared with a placement that it doesn't have: outside the "
                    "matmuls, every tensor is replicated on each GPU.",
                )
            if Counter(calls) != {("all_reduce", size_bytes): 8}:
                raise Wrong(
                    yours=f"{len(calls)} collectives: {_in_words(calls)}",
                    expected=f"8 collectives: {_in_words([('all_reduce', size_bytes)] * 8)}",
                    hint=_hint_for_count(len(calls)),
                )
    return {
        "for": given,
        "logits and gradients": "match those of one GPU",
        "sent": f"{_in_words(results[0][2])}: four in each layer instead of seven",
    }


def _hint_for_error(yours: str) -> str:
    if "same length" in yours:
        return "attention is called with three inputs, x, cos and sin: the plan needs an entry for each."
    if "mixed torch.Tensor and DTensor" in yours:
        return (
            "Some tensors became DTensors, and an operation combines them with plain ones. Only x "
            "should become a DTensor, and only where it enters attention or feed_forward: None "
            "leaves cos and sin as they are."
        )
    return "The model doesn't run: one of the layers doesn't get the part that it expects."


def _hint_for_count(count: int) -> str:
    return {
        14: "Nothing is shared yet: each matmul still makes its own DTensor from its input. Does "
        "PrepareModuleInput make x a DTensor, and is it on the modules that contain the matmuls?",
        12: "The feed-forward part is done. In attention, query, key and value still make three "
        "DTensors from one input.",
        10: "Attention is done. In the feed-forward part, gate and up still make two DTensors from "
        "one input.",
    }.get(count, "The results are right, but over budget: which input becomes a DTensor twice?")


def _plan_in(answer: Any, block: nn.Module, given: str, start: str) -> dict[str, Any]:
    """Return the plan as a dict; raise ``Wrong`` if it isn't one, or names an unknown module."""
    if not isinstance(answer, Mapping):
        raise Wrong(
            yours=answer,
            expected="a dict that says for each module name how to split the module",
            given=given,
            hint=f"Start with {start}.",
        )
    known = {name for name, _ in block.named_modules()}
    if unknown := [name for name in answer if not any(_matches(each, name) for each in known)]:
        raise Wrong(
            yours=f"a plan for {', '.join(unknown)}",
            expected=f"some of these names: {', '.join(sorted(filter(None, known)))}",
            given=given,
            hint="If no module has that name, PyTorch only warns, and ignores the entry.",
        )
    return dict(answer)


@exercise("13.3", "A plan with three faults", callable_answer=False)
def plan_with_three_faults(answer: Any) -> dict[str, Any]:
    torch.manual_seed(random.randrange(2**31))
    block, x = TransformerBlock(_SMALL), torch.randn(2, 6, 32, requires_grad=True)
    angles = rotary_angles(x.size(1), 8, _SMALL.rotary_base)
    inputs = [x, angles.cos(), angles.sin()]
    given = "a TransformerBlock with 4 query heads and 2 key-value heads, on 2 ranks"
    plan = _plan_in(answer, block, given, start="{**faulty, ...}")
    try:
        results = on_ranks(_beside_whole, 2, block, inputs, plan, given=given)
    except Wrong as wrong:
        wrong.hint = (
            "The block doesn't run: one of the layers doesn't get the part that it expects. "
            "Follow the tensors: ColwiseParallel takes its full input, RowwiseParallel one part.\n"
            f"{wrong.hint}"
        )
        raise
    for rank, (off, off_gradient, calls, shares) in enumerate(results):
        with for_input(f"{given}; on rank {rank}"):
            whole = sorted(name for name, share in shares.items() if share > 0.5)
            if not (off <= 1e-4 and off_gradient <= 1e-3):
                paired = {"attention.key.weight", "attention.value.weight"} & set(whole)
                raise Wrong(
                    yours=f"output off by {off:.2g}, gradients by {off_gradient:.2g}",
                    expected="the output and gradients of one GPU",
                    hint="Each rank has half of the query heads, but all of the key-value heads: "
                    "it pairs the wrong ones."
                    if paired
                    else "Somewhere, part of a sum or part of a row is used as if it were the "
                    "whole: what does each layer output?",
                )
            if whole:
                raise Wrong(
                    yours=f"each rank holds all of {', '.join(whole)}",
                    expected="each rank holds half of each matrix",
                    hint="The results are right, but these layers have no entry in the plan.",
                )
            wanted = [("all_reduce", x.nbytes)] * 4
            if Counter(calls) != Counter(wanted):
                raise Wrong(
                    yours=f"sends {_in_words(calls)}",
                    expected=f"sends {_in_words(wanted)}",
                    hint="The results are right, but over budget: which input becomes a DTensor "
                    "more than once? And what's gathered, only to be split again?",
                )
    return {
        "for": given,
        "output and gradients": "match those of one GPU",
        "sent": f"{_in_words(calls)}, as budgeted",
    }


def _matches(name: str, pattern: str) -> bool:
    """Return whether a plan's pattern matches a module's name, as in ``parallelize_module``.

    The parts between the dots are matched one by one; * and [...] are as in file names.
    """
    parts = name.split("."), pattern.split(".")
    return len(parts[0]) == len(parts[1]) and all(map(fnmatch, *parts))


def _beside_whole(
    rank: int,
    world_size: int,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    plan: dict[str, Any],
) -> tuple[float, float, list[tuple[str, int]], dict[str, float]]:
    """Return output and gradient errors, the collectives, and this rank's share of each matrix.

    The gradients are those of the parameters, and of the inputs that require gradients.
    """
    gpu = own_gpu()
    module = module.to(gpu)
    theirs, mine = (
        [x.detach().to(gpu).requires_grad_(x.requires_grad) for x in inputs] for _ in range(2)
    )
    expected = module(*theirs)
    names = [name for name, _ in module.named_parameters()]
    wanted = [x for x in theirs if x.requires_grad]
    gradients = torch.autograd.grad(
        expected.square().mean(), [*wanted, *map(module.get_parameter, names)]
    )
    parallelize_module(module, init_device_mesh(gpu.type, (world_size,)), plan)
    with CollectiveCounter() as sent:
        output = module(*mine)
        if isinstance(output, DTensor):
            raise TypeError("the output is a DTensor; it must be a plain tensor")
        output.square().mean().backward()
    found = [x.grad for x in mine if x.requires_grad]
    found += [module.get_parameter(name).grad for name in names]
    pairs = zip(found, gradients, strict=True)
    off = [(_full(a) - b).abs().max().item() for a, b in pairs]
    shares = {
        name: (p.to_local() if isinstance(p, DTensor) else p).numel() / p.numel()
        for name, p in module.named_parameters()
        if p.dim() == 2
    }
    return (output - expected).abs().max().item(), max(off), sent.calls, shares


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@exercise("13.4", "Cross-entropy without gathering logits")
def split_cross_entropy(answer: Callable[..., Any]) -> dict[str, Any]:
    shown = {}
    # On 2 ranks, all logits are so large that exp overflows; on 3, only one is.
    for ranks, offset in ((2, 200.0), (3, 0.0)):
        tokens, words = random.randint(2 * ranks, 9), ranks * random.randint(3, 6)
        logits = 3 * torch.randn(tokens, words) + offset
        logits[0, random.randrange(words)] += 0 if offset else 150
        targets = torch.randint(words, (tokens,))
        targets[:ranks] = torch.arange(ranks) * (words // ranks)  # each rank's first and last index
        targets[ranks : 2 * ranks] = targets[:ranks] + words // ranks - 1

        # Inside the check, so that it's pickled by value: ranks don't have to import the checks.
        def split(
            rank: int, world_size: int, answer: Any, logits: torch.Tensor, targets: torch.Tensor
        ) -> Any:
            mine = logits.chunk(world_size, 1)[rank].to(own_gpu()).requires_grad_()
            with CollectiveCounter() as forward:
                loss = answer(mine, targets.to(own_gpu()))
            if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
                loss = loss.detach().cpu() if isinstance(loss, torch.Tensor) else loss
                return loss, None, forward.calls, []
            with CollectiveCounter() as backward:
                run_backward(loss, instead=_A_FUNCTION + "as Leave does")
            gradient = None if mine.grad is None else mine.grad.cpu()
            return loss.detach().cpu(), gradient, forward.calls, backward.calls

        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, targets)
        expected.backward()
        assert whole.grad is not None
        large = ", all around 200" if offset else ", one around 150"
        given = f"{ranks} ranks, {tokens} tokens, {words // ranks} logits per token on each{large}"
        results = on_ranks(split, ranks, answer, logits, targets, given=given)
        for rank, (loss, gradient, forward, backward) in enumerate(results):
            with for_input(f"{given}; on rank {rank}"):
                hint = _hint_for_loss(loss, expected.item(), tokens)
                expect_close(loss, expected.detach(), hint=hint, rtol=1e-4, atol=1e-4)
                right = whole.grad.chunk(ranks, 1)[rank]
                hint = _hint_for_gradient(gradient, right, ranks)
                where = f"{given}; on rank {rank}, the gradient"
                expect_close(gradient, right, given=where, hint=hint, rtol=1e-3, atol=1e-5)
                _expect_budget(forward, 3, 4 * tokens, "forward")
                _expect_budget(backward, 0, 0, "backward")
        gathered = 4 * tokens * words * (ranks - 1) / ranks
        used = 3 * 2 * (ranks - 1) / ranks * 4 * tokens
        shown[given] = (
            f"loss and gradient match; {format_bytes(used)} sent, three numbers per token; "
            f"gathering the logits would take {format_bytes(gathered)}, more with a larger vocabulary"
        )
    return shown


def _hint_for_loss(yours: Any, expected: float, tokens: int) -> str:
    if not isinstance(yours, torch.Tensor) or yours.dim():
        return "Return the mean over the tokens, a zero-dimensional tensor, on every rank."
    if not yours.isfinite():
        return "exp overflows: first subtract the largest logit across all ranks."
    if torch.isclose(yours, torch.tensor(expected * tokens), rtol=1e-3):
        return "This is the sum over the tokens; return the mean."
    return (
        "All-reduce the sum of exp, and the target's logit: one rank has it, and all others "
        "contribute 0. Subtract the same largest logit from both."
    )


# (width, tokens): first the GPUs are the bottleneck, then the host.
_FAR = ((1024, 32768), (1024, 256))
# An estimate leaves out small costs and adds none: the right answer is up to 5.8% too short, and
# never too long. With half of the latency, it's 7.1% too short; with one all-reduce missing, 9.6%;
# with 2 tensors sent instead of 2(n - 1)/n, it's 2.0% too long.
_FAR_BELOW, _FAR_ABOVE = 0.07, 0.01
_SPLIT = ("attention", "feed_forward")  # not the norms or the residual additions


@exercise("13.5", "How far to split")
def how_far_to_split(answer: Callable[..., Any]) -> dict[str, Any]:
    shown = {}
    for width, tokens in _FAR:
        alone = _layer_on(width, tokens, 1)
        figures = _figures_of(alone, tokens * width * 2)
        given = f"width {width}, {tokens} tokens: " + ", ".join(
            f"{name} = {value:.3g}" for name, value in figures.items()
        )
        with for_input(given, "Return a dict: {1: .., 2: .., 4: .., 8: ..}, in seconds."):
            yours = answer(*figures.values())
            if not isinstance(yours, Mapping) or sorted(yours) != [1, 2, 4, 8]:
                raise Wrong(
                    yours=yours,
                    expected="a dict with the keys 1, 2, 4 and 8",
                )
            yours = {degree: float(value) for degree, value in yours.items()}
        of_degrees = {1: alone} | {n: _layer_on(width, tokens, n) for n in (2, 4, 8)}
        for degree, timeline in of_degrees.items():
            wanted = timeline.makespan_s
            if not (1 - _FAR_BELOW) * wanted <= yours[degree] <= (1 + _FAR_ABOVE) * wanted:
                raise Wrong(
                    yours=f"{format_seconds(yours[degree])} on {degree} GPUs",
                    expected=f"{format_seconds(wanted)}, at most {_FAR_BELOW:.0%} less or "
                    f"{_FAR_ABOVE:.0%} more",
                    given=given,
                    hint=_hint_for_time(yours, degree, figures, wanted),
                )
        shown[f"width {width}, {tokens} tokens"] = "; ".join(
            f"{degree}: {format_seconds(yours[degree])} ({format_seconds(of.makespan_s)} in virtual "
            f"time), {yours[1] / (degree * yours[degree]):.0%} efficiency"
            for degree, of in of_degrees.items()
        )
    return shown


def _hint_for_time(
    yours: dict[int, float], degree: int, figures: Mapping[str, float], wanted: float
) -> str:
    if yours[degree] < (1 - _FAR_BELOW) * figures["host_s"]:
        return "The host isn't done by then: it launches as many kernels as for one GPU."
    if degree == 1:
        return (
            "One GPU computes everything and sends nothing. Meanwhile, the host launches kernels: "
            "the longer of the two times counts."
        )
    if yours[degree] < wanted:
        return (
            "Too short. The work that each GPU does in full doesn't shrink, and there are four "
            "all-reduces: each of their 2(n - 1) steps adds its latency."
        )
    return (
        "Too long. split_s is divided among the GPUs, and a ring sends 2(n - 1)/n of a tensor, at "
        "80% of 450 GB/s. The GPUs compute while the host launches kernels: the longer of the two "
        "times counts."
    )


def _layer_on(width: int, tokens: int, degree: int) -> vgpu.Timeline:
    """Record forward and backward of one bfloat16 block on ``degree`` H100s on one host."""
    sizes = TransformerSizes(1, width, width // 128, width // 128, 4 * width, 1)
    with vgpu.cluster(1, degree, "H100"), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (degree,))
        with torch.device("vgpu"):
            block = TransformerBlock(sizes).bfloat16()
            x = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
            cos, sin = torch.empty(2, tokens, 64)
        if degree > 1:
            parallelize_module(block, mesh, _plan())
        with vgpu.record() as timeline:
            block(x, cos, sin).sum().backward()
    return timeline


def _plan() -> dict[str, Any]:
    """Return the lesson's plan, in which matmuls share inputs, so it needs four all-reduces."""
    whole = Replicate()
    first = ["attention.query", "attention.key", "attention.value"]
    first += ["feed_forward.gate", "feed_forward.up"]
    return {
        **dict.fromkeys(first, ColwiseParallel()),
        "attention.output": RowwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
    }


def _figures_of(alone: vgpu.Timeline, size_bytes: int) -> dict[str, float]:
    """Return the exercise's inputs: time in the parts to be split, in the rest, and on the host."""
    inside = [e for e in alone.events if e.module.partition(".")[0] in _SPLIT]
    split_s = sum(event.duration_s for event in inside)
    return {
        "split_s": split_s,
        "whole_s": sum(event.duration_s for event in alone.events) - split_s,
        "host_s": alone.host_s,
        "size_bytes": size_bytes,
    }
