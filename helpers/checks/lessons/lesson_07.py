"""Checks for lesson 07: run answers under DistributedDataParallel on real ranks."""

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input
from helpers.checks.on_ranks import on_ranks, run_backward
from helpers.checks.watchers import WatchedLinear, count_sent, expect_one_micro_batch
from vgpu.profiling import count_collectives_on_gpu, own_gpu


@exercise("7.1", "DDP by hand")
def handmade_ddp(answer: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    largest, counts = 0.0, set()
    for ranks in (2, 3):
        x, y = torch.randn(3, 6, 4), torch.randn(3, 6, 1)  # (steps, batch, features)

        # Nested, so that it's pickled by value: ranks don't have to import the checks.
        def steps_of(
            rank: int, world_size: int, x: torch.Tensor, y: torch.Tensor, wrap: Any
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            """Return the tensors at the start, and the parameters after each step."""
            torch.manual_seed(rank)
            module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
            module.register_buffer("scale", torch.rand(1) + 0.5)
            module.register_buffer("shift", torch.rand(1), persistent=False)
            module.to(own_gpu())
            wrapped = wrap(module) if wrap else module
            if not isinstance(wrapped, nn.Module):
                raise TypeError(f"HandmadeDDP returned {wrapped!r}; it must return a module")
            if isinstance(wrapped, DistributedDataParallel):
                raise TypeError(
                    "HandmadeDDP is PyTorch's own DDP; write yours from broadcast and all_reduce"
                )
            tensors = (*module.buffers(), *module.parameters())
            start = [tensor.detach().cpu() for tensor in tensors]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            after = []
            parts = (part[:, rank::world_size].to(own_gpu()) for part in (x, y))
            for own_x, own_y in zip(*parts, strict=True):
                optimizer.zero_grad()
                out = wrapped(own_x) * module.scale + module.shift
                run_backward((out - own_y).square().mean(), instead="send parameter.detach()")
                optimizer.step()
                after.append(nn.utils.parameters_to_vector(module.parameters()).detach().cpu())
            return start, after

        def run_counted(
            rank: int, world_size: int, x: torch.Tensor, y: torch.Tensor, wrap: Any
        ) -> Any:
            return count_collectives_on_gpu(rank, world_size, steps_of, x, y, wrap)

        given = f"{ranks} ranks with different seeds, 3 steps of {len(x[0]) // ranks} samples each"
        results = on_ranks(run_counted, ranks, x, y, answer, given=given)
        [(single, steps)] = on_ranks(steps_of, 1, x, y, None, given=given)
        unsaved = "the buffer with persistent=False"
        names = ["the buffer", unsaved] + ["a parameter"] * 4
        for rank, ((start, _), _) in enumerate(results):
            for name, mine, theirs in zip(names, start, single, strict=True):
                if not torch.equal(mine, theirs):
                    raise Wrong(
                        yours=f"{name}: rank {rank} has its own value",
                        expected="rank 0's value, on every rank",
                        given=f"right after wrapping, {given}",
                        hint="A state_dict omits non-persistent buffers; module.buffers() doesn't."
                        if name == unsaved
                        else "Broadcast parameters and buffers from rank 0 while wrapping.",
                    )
        for rank, ((_, after), calls) in enumerate(results):
            with for_input(f"rank {rank}; {given}"):
                hint = _hint_for_steps(
                    after[0], steps[0], nn.utils.parameters_to_vector(single[2:])
                )
                for step, (mine, theirs) in enumerate(zip(after, steps, strict=True)):
                    at = f"the parameters after step {step + 1}, rank {rank}; {given}"
                    expect_close(mine, theirs, given=at, hint=hint)
                    largest = max(largest, (mine - theirs).abs().max().item())
                reduces = sum(name == "all_reduce" for name, _ in calls)
                counts.add(reduces / 3)
                if reduces > 3 * 4:
                    raise Wrong(
                        yours=f"{reduces} calls to all_reduce in 3 steps",
                        expected="12: one per backward for each of the 4 parameters",
                        hint="Register one hook for each parameter, and do it only once.",
                    )
    return {
        "largest difference from one process": f"{largest:.1e}, on 2 and 3 ranks, in 3 steps",
        "all_reduce": f"{max(counts):g} per step, for 4 parameters",
    }


def _hint_for_steps(mine: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> str:
    """Return a hint based on the first step's update, which may be a multiple of the right one."""
    moved, right = mine - start, theirs - start
    scale = (moved @ right / (right @ right)).item()
    if torch.allclose(moved, right * round(scale), rtol=1e-3, atol=1e-6) and round(scale) > 1:
        return f"Each step is {round(scale)} times too large: divide the sum by the world size."
    if torch.equal(mine, start):
        return "No parameter changed: are the gradients still there when the optimizer steps?"
    return "Each rank must step with the gradients averaged across all ranks."


@exercise("7.2", "Sum or average")
def sum_or_average(answer: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    for sizes in ([5, 2], [random.randint(5, 9), random.randint(1, 2), 3]):
        ranks, total = len(sizes), sum(sizes)
        x, y = torch.randn(total, 3), torch.randn(total)
        weight = torch.randn(1, 3)

        # Nested, so that it's pickled by value: ranks don't have to import the checks.
        def gradient(
            rank: int,
            world_size: int,
            x: torch.Tensor,  # (N, 3)
            y: torch.Tensor,  # (N,)
            weight: torch.Tensor,  # (1, 3)
            sizes: list[int],
        ) -> torch.Tensor:
            model = nn.Linear(3, 1, bias=False)
            model.weight.data.copy_(weight)
            parallel = DistributedDataParallel(model.to(own_gpu()))
            own_x, own_y = (part.split(sizes)[rank].to(own_gpu()) for part in (x, y))
            loss = answer((parallel(own_x)[:, 0] - own_y).square())
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f"loss_for_ddp returned {loss!r}; it must return a tensor")
            run_backward(loss, instead="pass it a tensor without a graph, such as a count")
            if model.weight.grad is None:
                raise ValueError("backward() left no gradient: is the loss detached?")
            return model.weight.grad.cpu()

        def run_counted(rank: int, world_size: int, *args: Any) -> torch.Tensor:
            return count_collectives_on_gpu(rank, world_size, gradient, *args)[0]

        given = f"{ranks} ranks with {', '.join(map(str, sizes))} samples"
        # (samples, features): the gradient of each sample's squared error.
        single = 2 * (x @ weight[0] - y)[:, None] * x
        expected = single.mean(0, keepdim=True)
        means = torch.stack([part.mean(0) for part in single.split(sizes)])
        usual = {
            "The mean over this rank's samples gives a rank with few samples as much weight as one "
            "with many.": means.mean(0),
            "That's the usual mistake: a mean over this rank's samples must not be multiplied by "
            "the world size, because DDP has already averaged.": means.sum(0),
            "These are sums: nothing has been divided by the number of samples.": single.sum(0)
            / ranks,
            "Nothing has been divided by the number of samples.": single.sum(0),
            "DDP divides by the world size once more, so this gradient is too small by that "
            "factor.": expected[0] / ranks,
        }
        for yours in on_ranks(run_counted, ranks, x, y, weight, sizes, given=given):
            hint = "Compare with (sum of all losses on all ranks) / (total number of samples)."
            for reason, wrong in usual.items():
                if torch.allclose(yours[0], wrong, rtol=1e-4, atol=1e-6):
                    hint = reason
            expect_close(
                yours, expected, given=f"the gradient, {given}", hint=hint, rtol=1e-4, atol=1e-6
            )
    return {
        "given": given,
        "your gradient": f"{yours[0].tolist()} on every rank",
        "largest difference": f"{(yours - expected).abs().max().item():.1e} from one process",
    }


@exercise("7.3", "A sampler for validation")
def validation_sampler(answer: Callable[..., Any]) -> dict[str, Any]:
    cases = [(12, 4), (10, 4), (2, 5), (random.randint(20, 90), random.randint(2, 7))]
    for length, ranks in cases:
        data = list(range(length))
        given = f"{length} samples on {ranks} ranks"
        with for_input(given):
            samplers = [answer(data, num_replicas=ranks, rank=rank) for rank in range(ranks)]
            # Cut off an endless iterator, which would hang the notebook.
            parts = [list(islice(sampler, 2 * length)) for sampler in samplers]
            sizes = _judge_parts(parts, data)
            hint = "len(sampler) is the number of samples on this rank; a DataLoader needs it."
            lengths = [len(sampler) for sampler in samplers]
            expect_equal(lengths, sizes, given=f"the lengths, {given}", hint=hint)
            again = [sorted(sampler) for sampler in samplers]
            walked = [sorted(part) for part in parts]
            hint = (
                "A DataLoader iterates over the sampler in every epoch: __iter__ must start over."
            )
            expect_equal(again, walked, given=f"a second epoch, {given}", hint=hint)
            loader: DataLoader[int] = DataLoader(
                data,  # type: ignore[arg-type]
                batch_size=4,
                sampler=samplers[0],
            )
            loaded = sorted(int(index) for batch in loader for index in batch)
            expect_equal(loaded, walked[0], given=f"through a DataLoader, rank 0, {given}")
    return {
        f"{length} samples on {ranks} ranks": f"parts of {sizes}",
        "repeated or left out": "no sample",
    }


def _judge_parts(parts: list[list[int]], data: list[int]) -> list[int]:
    """Return the parts' sizes; raise Wrong unless they're even and cover each sample once."""
    dealt = [index for part in parts for index in part]
    twice = sorted({index for index in dealt if dealt.count(index) > 1})
    if twice:
        hint = f"Padding repeats samples {twice}: they would be counted twice."
        raise Wrong(yours=parts, expected="no sample twice", hint=hint)
    if sorted(dealt) != data:
        hint = "Some samples are assigned to no rank, or some indices don't exist."
        raise Wrong(yours=parts, expected=f"every sample from 0 to {len(data) - 1}", hint=hint)
    sizes = [len(part) for part in parts]
    if max(sizes) - min(sizes) > 1:
        raise Wrong(
            yours=f"parts of {sizes}",
            expected="sizes that differ by at most 1",
            hint="The slowest rank sets the pace: split the samples as evenly as possible.",
        )
    return sizes


@exercise("7.4", "Accumulate, and reduce once")
def accumulate_and_send_once(
    answer: Callable[[DistributedDataParallel, list[tuple[torch.Tensor, torch.Tensor]]], None],
) -> dict[str, Any]:
    for count in (2, random.randint(3, 5)):
        ranks, size = 2, random.randint(2, 4)
        # Two accumulations, because the first could leave state behind.
        x = torch.randn(2, ranks, count, size, 6)
        y = torch.randn(2, ranks, count, size, 1)

        def accumulate_twice(
            rank: int, world_size: int, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
        ) -> tuple[list[torch.Tensor], list[int], int, int]:
            """Return each accumulation's gradient and bytes sent, the most samples in one forward,
            and the most graphs of earlier forwards that were alive during a forward.
            """
            model = WatchedLinear(6, 1, bias=False)
            model.weight.data.copy_(weight)
            parallel = DistributedDataParallel(model.to(own_gpu()))
            sent = count_sent(parallel)
            bytes_sent: list[int] = []
            gradients: list[torch.Tensor] = []
            for turn in range(2):
                model.weight.grad = None
                parts = (part[turn, rank].to(own_gpu()) for part in (x, y))
                answer(parallel, list(zip(*parts, strict=True)))
                if model.weight.grad is None:
                    raise ValueError("accumulate left no gradient: it never called backward()")
                gradients.append(model.weight.grad.cpu())
                bytes_sent.append(sum(sent))
                sent.clear()
            return gradients, bytes_sent, max(model.samples), max(model.graphs_held)

        weight = torch.randn(1, 6)
        given = f"{ranks} ranks, {count} micro-batches of {size} samples"
        results = on_ranks(accumulate_twice, ranks, x, y, weight, given=given)
        for turn in range(2):
            flat_x, flat_y = x[turn].flatten(0, 2), y[turn].flatten(0, 2)
            expected = 2 * ((flat_x @ weight.T - flat_y) * flat_x).mean(0, keepdim=True)
            where = given if turn == 0 else f"a second accumulation, {given}"
            for rank, (gradients, sent, largest, held) in enumerate(results):
                with for_input(f"rank {rank}, {where}"):
                    _judge(gradients[turn], expected, count, sent[turn])
                    expect_one_micro_batch(largest, size, held)
    once = results[0][0][0].nbytes
    return {
        "given": given,
        "your bytes": f"{results[0][1][0]}, one complete gradient",
        "with an all-reduce after each micro-batch": f"{count * once}",
    }


def _judge(
    gradient: torch.Tensor,
    expected: torch.Tensor,
    count: int,
    sent_bytes: int,
) -> None:
    """Judge one rank's gradient and bytes after one accumulation of ``count`` micro-batches."""
    once = gradient.nbytes
    right = torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    if sent_bytes == 0:
        alone = "Each rank keeps its own gradient. Let DDP reduce it in the last backward."
        by_hand = (
            "The gradient is right, but you reduced it yourself. Let DDP do it in the last "
            "backward: DDP reduces in buckets, while backward is still running."
        )
        raise Wrong(
            yours="DDP reduced nothing",
            expected=f"{once} bytes, one complete gradient",
            hint=by_hand if right else alone,
        )
    hint = "Compare with the mean over all micro-batches on all ranks."
    if torch.allclose(gradient, count * expected, rtol=1e-4, atol=1e-6):
        hint = (
            f"This is {count} times too large: divide by {count} for a mean over the micro-batches."
        )
    elif torch.allclose(2 * gradient, expected, rtol=1e-4, atol=1e-6):
        hint = "This is half the right gradient: DDP already divides by the number of ranks, 2."
    expect_close(gradient, expected, hint=hint, rtol=1e-4, atol=1e-6)
    if sent_bytes > once:
        raise Wrong(
            yours=f"{sent_bytes} bytes reduced",
            expected=f"{once} bytes, one complete gradient",
            hint="DDP reduced after more than one micro-batch. The forward decides whether DDP "
            "reduces, so it belongs inside no_sync(), too.",
        )
