"""Checks for lesson 18: a cache, a batch, a split vocabulary, a cache's bytes, a fair schedule."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from helpers.checks.core import (
    Wrong,
    exercise,
    expect_equal,
    expect_number,
    expect_two,
    for_input,
    hint_by_value,
)
from helpers.checks.on_ranks import on_ranks
from vgpu.plan.serving import Generation, Request, Server, chunked_prefill, simulate_queue
from vgpu.plan.transformer import LLAMA, TransformerSizes
from vgpu.profiling import CollectiveCounter, own_gpu
from vgpu.units import format_bytes, format_seconds


@exercise("18.1", "Keep keys and values")
def keys_and_values(answer: Callable[..., Any]) -> dict[str, Any]:
    batch, heads, width = random.sample(range(2, 8), 3)
    passes = [random.randint(9, 12), 1, 1, random.randint(2, 4), 1]
    caches: list[dict[str, torch.Tensor]] = [{}, {}]
    news: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]  # of each layer
    for number, new in enumerate(passes):
        for layer, cache in enumerate(caches):
            shape = (batch, heads, new, width)
            news[layer].append((torch.randn(shape), torch.randn(shape)))
            given = f"pass {number + 1} of layer {layer}, new tokens: {new}; key and value {shape}"
            with for_input(
                given, "cache is empty at first. Tokens are dimension 2 of each tensor."
            ):
                returned = answer(cache, *news[layer][-1])
                # A tensor whose batch is 2 would unpack into two as well.
                hint = "Return two tensors, the keys and the values."
                expect_two(returned, "(keys, values)", hint)
                found = dict(zip(("key", "value"), returned, strict=True))
                for place, name in enumerate(found):
                    olds = [each[place] for each in news[layer]]
                    whole, swapped = torch.cat(olds, 2), [each[1 - place] for each in news[layer]]
                    hint = _hint_for_cache(found[name], olds, swapped)
                    expect_equal(
                        found[name], whole, given=f"{given}; the {name}s returned", hint=hint
                    )
                    kept = cache.get(name)
                    if not isinstance(kept, torch.Tensor) or not torch.equal(kept, whole):
                        raise Wrong(
                            yours=f"a cache with {_shapes(cache)}",
                            expected=f"cache[{name!r}] of shape {tuple(whole.shape)}, as returned",
                            hint="The next pass needs them all: store old and new ones in cache.",
                        )
    return {"the last test case": f"{sum(passes)} tokens in {len(passes)} passes of two layers"}


def _shapes(cache: dict[str, Any]) -> str:
    shapes = (
        f"{name} {tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__}"
        for name, each in cache.items()
    )
    return ", ".join(shapes) or "nothing"


def _hint_for_cache(
    found: Any, news: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> str:
    whole = torch.cat(list(news), 2)
    if not isinstance(found, torch.Tensor):
        return "Return two tensors, the keys and the values."
    if torch.equal(found, torch.cat(list(others), 2)):
        return "Keys and values are swapped, or both are the same."
    if torch.equal(found, news[-1]):
        return "These are only the new ones: append them to those in cache."
    if torch.equal(found, torch.cat([news[-1], *news[:-1]], 2)):
        return "New ones come last."
    if found.numel() == whole.numel():
        return "Tokens are dimension 2 of (B, heads, tokens, head width)."
    return "All tokens of this layer so far, each once: first what cache has, then the new ones."


@exercise("18.2", "The largest batch within a latency limit")
def largest_batch_within_a_limit(answer: Callable[..., Any]) -> dict[str, Any]:
    gib, shown = 2**30, {}
    cases = {
        "time is short": (0.02, 2000, 33 * gib, 80 * 2**10, 72 * gib),
        "memory is short": (0.2, 2000, 66 * gib, 160 * 2**10, 72 * gib),
        "too slow for even one": (0.010, 2000, 33 * gib, 80 * 2**10, 72 * gib),
        "does not fit": (0.2, 2000, 131 * gib, 320 * 2**10, 72 * gib),
    }
    for name, (limit_s, context, weight_bytes, cache_bytes, memory_bytes) in cases.items():
        context += random.randint(0, 100)
        bytes_per_s = 0.8 * 3.35e12
        time_bytes = limit_s * bytes_per_s - weight_bytes
        room_bytes = memory_bytes - weight_bytes
        each = cache_bytes * context
        right = max(0, int(min(time_bytes, room_bytes) // each))
        given = (
            f"{format_seconds(limit_s)}, {context} tokens, weights {format_bytes(weight_bytes)}, "
            f"cache {format_bytes(cache_bytes)} per token, {format_bytes(memory_bytes)}, 2.68 TB/s"
        )
        with for_input(given):
            found = answer(limit_s, context, weight_bytes, cache_bytes, memory_bytes, bytes_per_s)
            expect_number(found, "a number of sequences", "Return how many.")
            expect_equal(
                found, right, hint=_hint_for_batch(found, right, time_bytes, room_bytes, each)
            )
        shown[name] = f"{right} sequences of {context} tokens within {format_seconds(limit_s)}"
    shown["kernel by kernel"] = _kernel_by_kernel(bytes_per_s)
    return shown


def _kernel_by_kernel(bytes_per_s: float) -> str:
    """What the estimate of "time is short" leaves out, on the server that it describes."""
    server = Server(LLAMA["70B"], 4)
    batch = server.most_sequences(2000)
    while server.decode_s(batch, 2000) > 0.02:
        batch -= 1
    alone_s, read_s = server.decode_s(1, 2000), server.weight_bytes / bytes_per_s
    left_bytes = 0.02 * bytes_per_s - server.weight_bytes
    estimate = int(left_bytes // (2000 * server.cache_bytes_per_token))
    return (
        f"Llama 70B on four H100s, 20 ms: only {batch} sequences of 2000 tokens, not the {estimate} of this "
        f"estimate. One user's token takes "
        f"{format_seconds(alone_s)}, not the {format_seconds(read_s)} of reading the weights: all-reduces "
        "and small kernels take the rest, which grows with every sequence"
    )


def _hint_for_batch(
    found: float, right: int, time_bytes: float, room_bytes: float, each: float
) -> str:
    if found < 0:
        return "If the weights alone don't fit, or can't be read in time, the answer is 0."
    if found in (time_bytes / each, room_bytes / each) or right < found <= right + 1:
        return "Round down: one more sequence would be too late, or wouldn't fit."
    if found == int(time_bytes // each) > right:
        return "That many are fast enough, but their caches don't fit in memory."
    if found == max(0, int(room_bytes // each)) > right:
        return "That many fit, but reading their caches takes longer than the limit."
    return "A step reads the weights once, and each sequence's cache. All of it must fit in memory."


@exercise("18.3", "Draw from a split vocabulary")
def draw_from_split_vocabulary(answer: Callable[..., Any]) -> dict[str, Any]:
    shown = {}
    for ranks in (2, 3):
        batch, words = random.randint(3, 7), ranks * random.randint(300, 400)
        logits, noise = torch.randn(batch, words), -torch.empty(batch, words).exponential_().log()
        best = torch.randint(words, (batch,))
        best[:2] = torch.tensor([words - 1, 0])  # the last rank's last word, the first rank's first
        each = words // ranks
        own = each * torch.arange(ranks) + torch.randint(1, each - 1, (batch, ranks))
        logits.scatter_(1, own, 20.0)  # on each rank, a word that noise alone wouldn't find
        logits[torch.arange(batch), best] += 40

        # Inside the check, so that it's pickled by value: ranks don't have to import the checks.
        def split(
            rank: int, world_size: int, answer: Any, logits: torch.Tensor, noise: torch.Tensor
        ) -> tuple[Any, list[tuple[str, int]]]:
            mine, own = (
                t.chunk(world_size, 1)[rank].clone().to(own_gpu()) for t in (logits, noise)
            )
            with CollectiveCounter() as sent:
                drawn = answer(mine, own)
            return drawn.cpu() if isinstance(drawn, torch.Tensor) else drawn, sent.calls

        scores = (logits + noise).unflatten(-1, (ranks, -1))  # (B, ranks, words on each)
        expected = scores.flatten(1).argmax(-1)
        bests = scores.argmax(-1) + each * torch.arange(ranks)  # of each rank
        given = f"{ranks} ranks, {batch} sequences, {each} tokens of the vocabulary on each"
        results = on_ranks(split, ranks, answer, logits, noise, given=given)
        for rank, (drawn, calls) in enumerate(results):
            with for_input(f"{given}; on rank {rank}"):
                hint = _hint_for_draw(drawn, expected, bests, each)
                expect_equal(drawn, expected, hint=hint)
                spent = sum(size for _, size in calls)
                most = 2 * 8 * batch * ranks  # a value of 4 bytes and an index of 8, or both as 8
                if spent > most:
                    raise Wrong(
                        yours=f"{format_bytes(spent)}; collectives: {len(calls)}",
                        expected=f"at most two numbers per sequence from each rank, {most} B",
                        hint="The tokens are right, but over budget: choose on each rank first.",
                    )
        shown[given] = (
            f"{format_bytes(spent)} gathered; all logits would be {format_bytes(4 * batch * words)}, "
            f"and {format_bytes(4 * batch * 128_256)} with Llama 3's vocabulary"
        )
    return shown


def _hint_for_draw(drawn: Any, expected: torch.Tensor, bests: torch.Tensor, words: int) -> str:
    if not isinstance(drawn, torch.Tensor) or drawn.shape != expected.shape:
        return "Return a tensor with one number for each sequence, (B,)."
    if drawn.dtype != torch.int64:
        return "Return the tokens' ids as int64, not values."
    if torch.equal(drawn, expected % words):
        return "An index counts from its rank's own first token: add rank * V/n."
    if (drawn.unsqueeze(-1) == bests).any(-1).all():
        return "Each rank's best is right; which rank has the best of all?"
    return "Take the largest of logits + noise on each rank, then the largest of those."


@exercise("18.4", "One GPU's cache")
def cache_of_one_gpu(answer: Callable[..., Any]) -> dict[str, Any]:
    shown = {}
    for name, tp, bits in (("8B", 1, 16), ("70B", 4, 8), ("405B", 16, 16), ("70B", 8, 4)):
        sizes = replace(LLAMA[name], layers=random.randint(20, 90))
        sequences, tokens = random.randint(2, 60), random.randint(100, 9000)
        server = Server(sizes, tp)  # in bfloat16
        right = server.cache_bytes_per_token * sequences * tokens * bits // 16
        given = (
            f"layers: {sizes.layers}, key-value heads: {sizes.key_value_heads}, head width: "
            f"{sizes.head_width}, {sequences} sequences of {tokens} tokens, {bits} bits, tp {tp}"
        )
        with for_input(given):
            found = answer(sizes, sequences, tokens, bits, tp)
            expect_number(found, "a number of bytes", "Return a product of integers.")
            if isinstance(found, float) and found == right:
                hint = "The number is right; make it an integer, with //."
                raise Wrong(yours=repr(found), expected=repr(right), hint=hint)
            expect_equal(found, right, hint=_hint_for_bytes(found, right, sizes, tp, bits))
        shown[f"Llama {name}'s heads, {sizes.layers} layers, {bits} bits, tp {tp}"] = (
            f"{format_bytes(right)} for {sequences} sequences of {tokens:,} tokens"
        )
    fits = {}  # the question that the exercise asks
    for gpus, bits, format_name in ((4, 16, "bfloat16"), (8, 8, "float8")):
        server = Server(LLAMA["70B"], gpus, weight_bits=bits, cache_bits=bits)
        caches = answer(server.sizes, 100, 16_000, bits, gpus)
        room = server.cache_tokens * server.cache_bytes_per_token
        fits[f"100 users with 16,000 tokens, 70B in {format_name} on {gpus} H100s"] = (
            f"{'yes' if caches <= room else 'no'}: {format_bytes(caches)} on each GPU, where the weights "
            f"leave {format_bytes(room)}"
        )
    return {**fits, **shown}


def _hint_for_bytes(found: float, right: int, sizes: TransformerSizes, tp: int, bits: int) -> str:
    group = sizes.heads // sizes.key_value_heads
    copies = tp // sizes.key_value_heads
    if copies > 1 and found in (0, right / copies):
        return "A GPU holds whole heads, so several GPUs may hold the same head."
    if bits < 8 and found == 0:
        return f"With {bits} bits, bits // 8 is 0: multiply everything first, then divide by 8."
    wrong = {
        "Keys and values: two elements, not one.": right / 2,
        "That's for all GPUs together; each has only some of the heads.": right * tp,
        "The cache holds key-value heads, and there are fewer of them than query heads.": right
        * group,
        "An element with that many bits has bits / 8 bytes.": right * 8,
        "An element takes as many bits as given, not always 16.": right * 16 / bits,
        "Every layer has its own cache.": right / sizes.layers,
    }
    return hint_by_value(
        found, {hint: value for hint, value in wrong.items() if value != right},
        "2 · layers · heads on this GPU · head width · sequences · tokens · bits / 8.", 1e-6,
    )  # fmt: skip


BUDGET = 256


@exercise("18.5", "Prefill that starves nobody")
def prefill_that_starves_nobody(answer: Callable[..., Any]) -> dict[str, Any]:
    # Short prompts keep coming, so shortest-first never gets to the long one.
    server = Server(LLAMA["8B"])
    long_prompt = random.randint(8_000, 10_000)
    requests = [Request(0.0, long_prompt, 5)]
    requests += [Request(0.004 * (i + 1), random.randint(60, 200), 20) for i in range(120)]
    given = f"a prompt of {long_prompt} tokens, then one of 60 to 200 every 4 ms, budget {BUDGET}"
    most_prompts = 0

    def schedule(generations: Sequence[Generation]) -> list[int]:
        nonlocal most_prompts
        tokens = answer(list(generations), BUDGET)
        prompts = [g.prompt_left for g in generations if g.prompt_left]
        most_prompts = max(most_prompts, len(prompts))
        with for_input(
            f"{given}; prompts left {prompts}, {len(generations) - len(prompts)} decoding"
        ):
            _check_forward(tokens, generations, BUDGET)
        return list(tokens)

    with for_input(given):
        served = simulate_queue(server, requests, schedule)
    lengths = random.sample(range(50, 500), 3)
    few = [Generation(Request(0.0, length, 5), length) for length in lengths]
    with for_input(f"prompts left {lengths}, none decoding, budget 2"):
        _check_forward(answer(list(few), 2), few, 2)
    in_order = simulate_queue(server, requests, chunked_prefill(BUDGET))

    def short(generations: list[Generation]) -> float:
        return sorted(g.first_token_s for g in generations[1:])[60]

    return {
        "for": given,
        "first token of the short ones": f"{format_seconds(short(served))} (median); in order of "
        f"arrival, {format_seconds(short(in_order))}",
        "first token of the long one": f"{format_seconds(served[0].first_token_s)}; in order of arrival "
        f"{format_seconds(in_order[0].first_token_s)}",
        "longest gap between two tokens": format_seconds(max(max(g.gaps_s) for g in served)),
        "prompts at once": f"up to {most_prompts}, and each advanced in every forward pass",
    }


def _check_forward(tokens: Any, generations: Sequence[Generation], budget: int) -> None:
    if not isinstance(tokens, list | tuple) or len(tokens) != len(generations):
        raise Wrong(
            yours=tokens,
            expected="a list with an integer for each generation, in order",
            hint="Return how many tokens each gets, as in [12, 1, 1], including those that decode.",
        )
    for n, g in zip(tokens, generations, strict=True):
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= (g.prompt_left or 1):
            raise Wrong(
                yours=f"{n!r} tokens for one with prompt_left {g.prompt_left}",
                expected="an integer, no more than it has left",
                hint="A generation that decodes gets one token, a prompt at most prompt_left.",
            )
    idle = [n for n, g in zip(tokens, generations, strict=True) if not g.prompt_left and n == 0]
    if idle:
        raise Wrong(
            yours=f"{len(idle)} of those that decode get no token",
            expected="one token for each of them",
            hint="Their users wait for the next token: they come first.",
        )
    prompts = [(n, g) for n, g in zip(tokens, generations, strict=True) if g.prompt_left]
    if sum(tokens) > budget:
        raise Wrong(
            yours=f"{sum(tokens)} tokens", expected=f"at most {budget} in a forward pass",
            hint="Generations that are decoding count, too. Divide only what's left.",
        )  # fmt: skip
    share = (budget - (len(generations) - len(prompts))) // max(1, len(prompts))
    if not any(tokens):
        raise Wrong(
            yours="a forward pass of 0 tokens",
            expected="at least 1",
            hint="There are fewer tokens than prompts, so an equal share rounds down to 0. Give some "
            "prompts one token each.",
        )
    if share and (starved := [g for n, g in prompts if n == 0]):
        raise Wrong(
            yours=f"a prompt with {starved[0].prompt_left} tokens left gets none",
            expected="some tokens for each waiting prompt",
            hint="It could wait a long time like this. Give each prompt an equal share of the pass.",
        )
    if short := [(n, g.prompt_left) for n, g in prompts if n < min(share, g.prompt_left)]:
        n, left = short[0]
        raise Wrong(
            yours=f"{n} tokens for a prompt with {left} left",
            expected=f"{min(share, left)} or more: decoding leaves {share} for each of {len(prompts)}",
            hint="It advances, but others overtake it. Give each prompt at least an equal share, "
            "unless it needs less.",
        )
    possible = min(budget, len(generations) - len(prompts) + sum(g.prompt_left for _, g in prompts))
    if sum(tokens) < possible - len(prompts):
        raise Wrong(
            yours=f"a forward pass of {sum(tokens)} tokens",
            expected=f"{possible}: there are that many to compute, and the budget allows them",
            hint="A prompt that needs less than its share leaves the rest to the others.",
        )
