"""Serving a transformer: whether it fits, how fast it generates tokens, how long requests wait.

    report(Server(LLAMA["8B"]), prompt=1000, output=200)
    served = simulate_queue(Server(LLAMA["70B"], tp=4), requests, chunked_prefill(512))

A server's forward pass takes some new tokens from each sequence, reads the cached keys and values
of its earlier ones, and generates one more token for each sequence. At first, all of a prompt's
tokens are new (prefill); later, there's one new token at a time (decoding). Times come from a
``CostModel``, kernel by kernel: matmuls fill a GPU as far as their rows allow, and attention reads
the cache. Within a host, tensor parallelism's all-reduces use the faster of NCCL's ring and a
one-shot all-reduce, in which each rank reads all other ranks' tensors. Serving engines use the
latter for small tensors.

Not modeled: the host's time (CUDA graphs replay launches), sampling, activation memory, cache
fragmentation, float8 scales, sequences that share a prefix, and speculative decoding.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from vgpu import NETWORKS, PRESETS, CostModel
from vgpu.hardware import Product
from vgpu.plan.transformer import TransformerSizes
from vgpu.tables import Table
from vgpu.time.costs import check_count, check_seconds
from vgpu.time.workloads import BFLOAT16, FLOAT8, Workload
from vgpu.units import format_bytes, format_seconds

BITS = (8, 16)
"""Bits per weight or cached element: 8 for float8, 16 for bfloat16."""

USABLE_MEMORY = 0.9
"""The fraction of a GPU's memory for weights and cache. (vLLM's gpu_memory_utilization also includes
activations.)
"""

_ACTIVATION_BYTES = 2  # per element of hidden states, embedding and output: bfloat16


def cache_bytes(sizes: TransformerSizes, tokens: int, bits: int = 16) -> int:
    """Return the bytes of keys and values for ``tokens`` tokens, in all layers, without copies."""
    return 2 * sizes.layers * sizes.key_value_width * tokens * bits // 8


DEFAULT_COST = CostModel(PRESETS["H100"], network=NETWORKS["InfiniBand NDR"], gpus_per_host=8)


@dataclasses.dataclass(frozen=True)
class Server:
    """One copy of a transformer on ``tp * pp`` GPUs, and its number formats.

    Raises ValueError for degrees that don't divide the sizes. If there are more ``tp`` ranks than
    key-value heads, multiple ranks hold the same head.
    """

    sizes: TransformerSizes
    tp: int = 1
    """Ranks that share each layer: heads, feed-forward columns, vocabulary."""
    pp: int = 1
    """Stages of consecutive layers; also the number of groups of sequences in flight."""
    weight_bits: int = 16
    """Bits per weight in the blocks' matmuls; with 8, the matmuls are also computed in float8. The
    embedding and the output stay in bfloat16.
    """
    cache_bits: int = 16
    cost: CostModel = DEFAULT_COST
    """The GPU, its links and network, and the fractions of their peaks that are reached."""
    _products: dict[tuple[int, ...], float] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """A cache of matmuls' times: most forward passes have the same matmuls."""

    def __post_init__(self) -> None:
        self.sizes.check()
        self.sizes.reject_experts_and_latent("serving")
        for name in ("tp", "pp"):
            check_count(name, getattr(self, name))
        for name in ("weight_bits", "cache_bits"):
            if getattr(self, name) not in BITS:
                raise ValueError(f"{name} must be 8 or 16, got {getattr(self, name)!r}")
        if self.weight_bits == 8 and self.cost.spec.fp8_flop_per_s is None:
            raise ValueError(
                f"{self.cost.spec.name} can't multiply float8 tensors: use weight_bits=16, or a "
                "GPU such as the H100"
            )
        sizes, tp = self.sizes, self.tp
        heads = {"heads": sizes.heads, "feed-forward width": sizes.feed_forward}
        uneven = [f"{name}: {size}" for name, size in heads.items() if size % tp]
        if sizes.key_value_heads % tp and tp % sizes.key_value_heads:
            uneven.append(f"key-value heads: {sizes.key_value_heads}")
        if uneven:
            raise ValueError(f"tp={tp} ranks can't share a layer evenly ({', '.join(uneven)})")
        if self.pp > sizes.layers:
            raise ValueError(f"pp={self.pp} stages are too many for {sizes.layers} layers")

    def with_costs(self, **changes: object) -> "Server":
        """Return a copy with changes to its ``CostModel``, such as its GPU, network or shares."""
        return dataclasses.replace(self, cost=self.cost.changed(changes))

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    # Bytes

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights on the fullest GPU: blocks, and the embedding, output or both."""
        sizes = self.sizes
        norms = 2 * sizes.width * _ACTIVATION_BYTES
        block = sizes.block_products * self.weight_bits // 8 // self.tp + norms
        end = sizes.vocabulary * sizes.width * _ACTIVATION_BYTES // self.tp
        return self._stage_layers * block + (2 if self.pp == 1 else 1) * end

    @property
    def cache_bytes_per_token(self) -> int:
        """The cache's bytes per token on each GPU of the stage with the most layers."""
        numbers = 2 * self._stage_layers * self._key_value_width
        return numbers * self.cache_bits // 8

    @property
    def cache_tokens(self) -> int:
        """The number of tokens that fit in the cache; negative if the weights don't fit."""
        room = USABLE_MEMORY * self.cost.spec.memory_bytes - self.weight_bytes
        return math.floor(room / self.cache_bytes_per_token)

    @property
    def fits(self) -> bool:
        """Whether the weights leave room for a sequence of the model's maximum length."""
        return self.cache_tokens >= self.sizes.sequence

    def most_sequences(self, tokens: int) -> int:
        """Return how many sequences of ``tokens`` tokens each the cache holds at once."""
        check_count("tokens", tokens)
        return max(0, self.cache_tokens // tokens)

    # Seconds

    def forward_s(self, work: Iterable[tuple[int, int]]) -> float:
        """Return the time of a forward pass through all stages.

        ``work`` has each sequence's numbers of new and cached tokens: ``[(2048, 0)]`` is the
        prefill of a prompt, ``[(1, 2048)] * 32`` a decoding step.
        """
        tokens = sequences = pairs = read = 0
        for new, cached in work:
            sequences += 1
            tokens += new
            # Each new token attends to all tokens up to itself.
            pairs += new * cached + new * (new + 1) // 2
            read += cached + new
        return self._forward_s(tokens, sequences, pairs, read)

    def prefill_s(self, prompt: int) -> float:
        """Return the time of a prompt's prefill, which ends with the first output token."""
        check_count("prompt", prompt)
        return self.forward_s([(prompt, 0)])

    def decode_s(self, batch: int, context: int) -> float:
        """Return the time until ``batch`` sequences of ``context`` tokens have their next token.

        With multiple stages, groups of batch / pp sequences follow each other, so that no stage is
        idle.
        """
        check_count("batch", batch)
        group = math.ceil(batch / self.pp)
        return self._forward_s(group, group, group * (context + 1), group * (context + 1))

    def generate_s(self, batch: int, prompt: int, output: int) -> float:
        """Return the time of a static batch of ``batch`` prompts of equal length, with outputs."""
        check_count("output", output)
        group = math.ceil(batch / self.pp)
        prefill_s = self.forward_s([(prompt, 0)] * group)
        return prefill_s + (output - 1) * self.decode_s(batch, prompt + output // 2)

    def tokens_per_s(self, batch: int, prompt: int, output: int) -> float:
        """Return the total output tokens/s if there are always ``batch`` sequences.

        As soon as a sequence ends, the next one's prompt is processed along with the others' next
        tokens (continuous batching with chunked prefill).
        """
        check_count("batch", batch)
        check_count("output", output)
        group = math.ceil(batch / self.pp)
        prompts = group / output  # prompts that start in each step
        context = prompt + output // 2
        step_s = self._forward_s(
            group + math.ceil(prompts * prompt),
            group,
            group * (context + 1) + math.ceil(prompts * prompt * (prompt + 1) / 2),
            group * (context + 1) + math.ceil(prompts * prompt),
        )
        return batch / step_s

    # One forward pass

    @property
    def _stage_layers(self) -> int:
        return math.ceil(self.sizes.layers / self.pp)

    @property
    def _key_value_width(self) -> int:
        """The width of one rank's keys, or values: at least one head."""
        return self.sizes.head_width * max(1, self.sizes.key_value_heads // self.tp)

    def _forward_s(self, tokens: int, sequences: int, pairs: int, read: int) -> float:
        sizes, tp, cost, bits = self.sizes, self.tp, self.cost, self.weight_bits
        width, narrow = sizes.width // tp, self._key_value_width
        hidden_bytes = tokens * sizes.width * _ACTIVATION_BYTES
        gated_bytes = tokens * sizes.feed_forward // tp * _ACTIVATION_BYTES
        attention = Workload(
            4 * pairs * width,
            2 * read * narrow * self.cache_bits // 8 + 2 * tokens * width * _ACTIVATION_BYTES,
            BFLOAT16,
        )
        block_s = sum(
            [
                2 * self._move_s(4 * hidden_bytes),  # a norm, and the residual sum before it
                self._product_s(tokens, sizes.width, width + 2 * narrow, bits),
                self._move_s(2 * tokens * (width + narrow) * _ACTIVATION_BYTES),  # rotary positions
                cost.kernel_time_s(attention),
                self._product_s(tokens, width, sizes.width, bits),
                self._product_s(tokens, sizes.width, 2 * sizes.feed_forward // tp, bits),
                self._move_s(3 * gated_bytes),
                self._product_s(tokens, sizes.feed_forward // tp, sizes.width, bits),
                2 * self.all_reduce_s(hidden_bytes),
            ]
        )
        output_s = self._product_s(sequences, sizes.width, math.ceil(sizes.vocabulary / tp), 16)
        return sizes.layers * block_s + output_s + self._sends_s(hidden_bytes)

    def _product_s(self, rows: int, inner: int, columns: int, bits: int) -> float:
        key = rows, inner, columns, bits
        if key not in self._products:
            written = rows * columns * _ACTIVATION_BYTES
            size_bytes = (rows * inner + inner * columns) * bits // 8 + written
            work = Workload(
                2 * rows * inner * columns,
                size_bytes,
                FLOAT8 if bits == 8 else BFLOAT16,
                Product(1, rows, inner, columns, written),
            )
            self._products[key] = self.cost.kernel_time_s(work)
        return self._products[key]

    def _move_s(self, size_bytes: int) -> float:
        return self.cost.kernel_time_s(Workload(0, size_bytes))

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the time to all-reduce a tensor across the ``tp`` ranks.

        In a one-shot all-reduce, each rank reads every other rank's full tensor, between two
        barriers.
        """
        if self.tp == 1:
            return 0.0
        ranks = range(self.tp)
        ring_s = self.cost.group_time_s("all_reduce", size_bytes, ranks)
        if len(self.cost.hosts_of(ranks)) > 1:
            return ring_s
        link = self.cost.link
        bytes_per_s = link.among_bytes_per_s(self.tp) * self.cost.link_share
        return min(ring_s, 2 * link.latency_s + (self.tp - 1) * size_bytes / bytes_per_s)

    def _sends_s(self, hidden_bytes: float) -> float:
        """Return the time of all sends between stages, in which each rank sends its part."""
        stages = [(stage * self.tp, (stage + 1) * self.tp) for stage in range(self.pp - 1)]
        each = hidden_bytes / self.tp
        return sum(self.cost.group_time_s("send", each, pair) for pair in stages)


# As text


def report(server: Server, prompt: int, output: int) -> str:
    """Return a report on whether the server fits and, by batch size, how long tokens take.

    ``prompt`` and ``output`` are tokens per request.
    """
    spec, sizes = server.cost.spec, server.sizes
    tokens = prompt + output
    most = server.most_sequences(tokens)
    head = f"tp {server.tp} × pp {server.pp} on {server.gpus} {spec.name.removeprefix('Virtual ')}"
    rows = [
        ("weights", format_bytes(server.weight_bytes)),
        ("cache per token", format_bytes(server.cache_bytes_per_token)),
        (f"memory ({USABLE_MEMORY:.0%} of it usable)", format_bytes(spec.memory_bytes)),
        ("tokens that fit in the cache", f"{max(0, server.cache_tokens):,}"),
        (f"sequences of {prompt:,} + {output:,} tokens", f"{most:,}"),
    ]
    bytes_table = str(Table(("bytes per GPU", ""), rows))
    if not most:
        need = f"a sequence of {tokens:,} tokens"
        more = "Use more GPUs, or 8 bits for weights and cache."
        return f"{head}\n\n{bytes_table}\n\nIt does not fit: there is no room for {need}. {more}"
    batches = [2**k for k in range(most.bit_length()) if server.pp <= 2**k < most] + [most]
    times = []
    for batch in batches:
        wait_s = server.decode_s(batch, prompt + output // 2)
        speed = server.tokens_per_s(batch, prompt, output)
        times.append((batch, *map(format_seconds, (wait_s, batch / speed)), f"{speed:,.0f}"))
    header = (
        "sequences at once",
        "decoding only: time per token",
        "with prompts: time per token",
        "with prompts: output tokens/s",
    )
    return "\n\n".join(
        [
            head,
            bytes_table,
            "It fits. Processing a prompt and generating the first output token takes "
            f"{format_seconds(server.prefill_s(prompt))}.",
            str(Table(header, times)),
            f"{sizes.parameters / 1e9:.1f} billion parameters. Virtual time, predicted by a cost "
            "model.",
        ]
    )


# Many users, in virtual time: how long requests wait under a schedule
#
# A step is one forward pass of the server over the tokens that the schedule picks: any number of a
# prompt's tokens, and the next token of sequences that are generating. The next step starts when
# this one ends. Sequences are admitted in order of arrival, as soon as the cache has room for the
# prompt and all of the output; until then, the schedule doesn't see them.
#
# Not modeled: the host's time between steps, prompts with a common prefix, and preemption, which
# evicts sequences from the cache to make room.
#
# Sources: Yu et al., 2022, Orca (continuous batching); Agrawal et al., 2024, Sarathi-Serve (prompts
# in chunks along with decoding).


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
        _check_schedule(tokens, taken_in)
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


def _check_schedule(tokens: list[int], generations: Sequence[Generation]) -> None:
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
