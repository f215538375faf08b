"""Simulates a server with many users, in virtual time: how long requests wait under a schedule.

    served = simulate_queue(Server(LLAMA["70B"], tp=4), requests, chunked_prefill(512))

A step is one forward pass of the server over the tokens that the schedule picks: any number of a
prompt's tokens, and the next token of sequences that are generating. The next step starts when this
one ends. Sequences are admitted in order of arrival, as soon as the cache has room for the prompt
and all of the output; until then, the schedule doesn't see them.

Not modeled: the host's time between steps, prompts with a common prefix, and preemption, which
evicts sequences from the cache to make room.

Sources: Yu et al., 2022, Orca (continuous batching); Agrawal et al., 2024, Sarathi-Serve (prompts
in chunks along with decoding).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from vgpu.plan.serving import Server
from vgpu.time.costs import check_count, check_seconds


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's request: its numbers of prompt tokens and output tokens."""

    arrival_s: float
    prompt: int
    output: int
    cached: int = 0
    """Prompt tokens whose keys and values come with the request, from a prefill server."""

    def __post_init__(self) -> None:
        check_seconds("arrival_s", self.arrival_s)
        check_count("prompt", self.prompt)
        check_count("output", self.output)
        if not 0 <= self.cached < self.prompt:
            raise ValueError(
                f"cached must be from 0 to {self.prompt - 1}, got {self.cached}: the last token of "
                "the prompt is always computed"
            )


@dataclasses.dataclass
class Generation:
    """A request's progress: how much of its prompt is left, and when its tokens were generated."""

    request: Request
    prompt_left: int
    token_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def computed(self) -> int:
        """The number of the request's tokens in the cache."""
        return self.request.prompt - self.prompt_left + max(0, len(self.token_s) - 1)

    @property
    def first_token_s(self) -> float:
        """The time from the request's arrival to its first token."""
        return self.token_s[0] - self.request.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between consecutive tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_s)]


Schedule = Callable[[Sequence[Generation]], Sequence[int]]
"""Returns how many tokens each admitted request gets in the next step, in order of arrival."""


def whole_prompts(generations: Sequence[Generation]) -> list[int]:
    """Schedule the first waiting prompt, whole and alone; if none is left, a token per sequence."""
    first = next((g for g in generations if g.prompt_left), None)
    if first is None:
        return [1] * len(generations)
    return [first.prompt_left if g is first else 0 for g in generations]


def chunked_prefill(budget: int) -> Schedule:
    """Schedule one token per generating sequence; prompts get the rest of ``budget``, in order."""
    check_count("budget", budget)

    def schedule(generations: Sequence[Generation]) -> list[int]:
        left = budget - sum(not g.prompt_left for g in generations)
        tokens = []
        for g in generations:
            tokens.append(min(g.prompt_left, max(left, 0)) if g.prompt_left else 1)
            left -= tokens[-1] if g.prompt_left else 0
        return tokens

    return schedule


def simulate_queue(
    server: Server,
    requests: Iterable[Request],
    schedule: Schedule,
    most_sequences: int = 256,
    static: bool = False,
) -> list[Generation]:
    """Simulate when each request's tokens are generated; return the requests in order of arrival.

    ``most_sequences`` is the maximum at any time, in addition to the cache's limit. With
    ``static``, new requests are admitted only when all previous ones have finished (a static
    batch). Raises ValueError for a request that's larger than the cache, and for a schedule that
    gives a sequence more tokens than it has left, or that picks no tokens.
    """
    if server.pp > 1:
        raise ValueError(
            f"simulate_queue supports only servers with one stage, got pp={server.pp}: with more, "
            "multiple groups would be in flight at once"
        )
    check_count("most_sequences", most_sequences)
    arriving = sorted(requests, key=lambda request: request.arrival_s)
    for request in arriving:
        if request.prompt + request.output > server.cache_tokens:
            raise ValueError(
                f"a request of {request.prompt} + {request.output} tokens is larger than the "
                f"server's entire cache, which has room for {max(0, server.cache_tokens)}"
            )
    everyone = [Generation(request, request.prompt - request.cached) for request in arriving]
    taken_in: list[Generation] = []
    clock_s, outside, reserved = 0.0, 0, 0
    while outside < len(everyone) or taken_in:
        open_now = not (static and taken_in)
        while open_now and outside < len(everyone) and len(taken_in) < most_sequences:
            next_one = everyone[outside]
            needed = next_one.request.prompt + next_one.request.output
            if next_one.request.arrival_s > clock_s or reserved + needed > server.cache_tokens:
                break
            taken_in.append(next_one)
            outside, reserved = outside + 1, reserved + needed
        if not taken_in:
            clock_s = everyone[outside].request.arrival_s
            continue
        tokens = list(schedule(taken_in))
        _check(tokens, taken_in)
        work = [(n, g.computed) for n, g in zip(tokens, taken_in, strict=True) if n]
        clock_s += server.forward_s(work)
        for n, generation in zip(tokens, taken_in, strict=True):
            if generation.prompt_left:
                generation.prompt_left -= n
            if n and not generation.prompt_left:
                generation.token_s.append(clock_s)
        ended = [g for g in taken_in if len(g.token_s) == g.request.output]
        reserved -= sum(g.request.prompt + g.request.output for g in ended)
        taken_in = [g for g in taken_in if len(g.token_s) < g.request.output]
    return everyone


def _check(tokens: list[int], generations: Sequence[Generation]) -> None:
    if len(tokens) != len(generations):
        raise ValueError(
            f"the schedule returned {len(tokens)} numbers for {len(generations)} sequences: it "
            "must return one for each"
        )
    for place, (n, g) in enumerate(zip(tokens, generations, strict=True)):
        most = g.prompt_left or 1
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= most:
            what = f"has {most} tokens of its prompt left"
            if not g.prompt_left:
                what = "generates one token per step"
            raise ValueError(
                f"the schedule returned {n!r} tokens for sequence {place}, which {what}: it "
                f"must return an integer from 0 to {most}"
            )
    if not any(tokens):
        raise ValueError(
            f"the schedule gave no tokens to any of {len(generations)} sequences: they would wait "
            "forever"
        )
