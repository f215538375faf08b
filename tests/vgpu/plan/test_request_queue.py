"""Requests in a queue: when each token is ready under each schedule, and what's rejected."""

import pytest

from vgpu.plan.request_queue import Request, chunked_prefill, simulate_queue, whole_prompts
from vgpu.plan.serving import Server
from vgpu.plan.transformer import LLAMA

SERVER = Server(LLAMA["8B"])


def test_a_lone_request_takes_a_prefill_and_a_step_per_token():
    (served,) = simulate_queue(SERVER, [Request(1.0, 300, 4)], whole_prompts)
    assert served.first_token_s == pytest.approx(SERVER.prefill_s(300))
    steps = [SERVER.forward_s([(1, context)]) for context in (300, 301, 302)]
    assert served.gaps_s == pytest.approx(steps)


def test_an_unchunked_prompt_stalls_other_requests_and_a_chunked_one_does_not():
    requests = [Request(0.0, 100, 50), Request(0.05, 8000, 2)]
    whole = simulate_queue(SERVER, requests, whole_prompts)
    chunks = simulate_queue(SERVER, requests, chunked_prefill(256))
    assert max(whole[0].gaps_s) > SERVER.prefill_s(8000)
    assert max(chunks[0].gaps_s) < 1.1 * SERVER.forward_s([(255, 8000), (1, 150)])
    assert whole[1].first_token_s < chunks[1].first_token_s


def test_chunked_prefill_stays_within_its_budget():
    asked = []

    def noted(generations):
        tokens = chunked_prefill(64)(generations)
        asked.append((sum(tokens), [n for n, g in zip(tokens, generations, strict=True)
                                    if not g.prompt_left]))  # fmt: skip
        return tokens

    simulate_queue(SERVER, [Request(0.0, 150, 5) for _ in range(6)], noted)
    assert max(total for total, _ in asked) == 64
    assert all(set(each) <= {1} for _, each in asked)


def test_a_static_batch_waits_for_its_longest_answer():
    requests = [Request(0.0, 10, 2), Request(0.0, 10, 40), Request(0.0, 10, 2)]
    options = {"schedule": whole_prompts, "most_sequences": 2}
    static = simulate_queue(SERVER, requests, static=True, **options)
    filled = simulate_queue(SERVER, requests, **options)
    assert static[2].token_s[0] > static[1].token_s[-1]
    assert filled[2].token_s[0] < filled[1].token_s[3]


def test_a_request_waits_until_the_cache_has_room():
    server = Server(LLAMA["70B"], tp=2)  # its cache holds 41,225 tokens
    first, second = simulate_queue(
        server, [Request(0.0, 30_000, 3), Request(0.0, 20_000, 3)], whole_prompts
    )
    assert second.token_s[0] > first.token_s[-1] + server.prefill_s(20_000) * 0.99


def test_a_request_with_a_cached_prefix_computes_only_the_rest():
    (served,) = simulate_queue(SERVER, [Request(0.0, 8001, 2, cached=8000)], whole_prompts)
    assert served.first_token_s == SERVER.forward_s([(1, 8000)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"arrival_s": -1.0}, "arrival_s must be a finite, non-negative number of seconds"),
        ({"prompt": 0}, "prompt must be an integer of at least 1"),
        ({"cached": 10}, "cached must be from 0 to 9, got 10"),
    ],
)
def test_a_request_rejects_impossible_sizes(request_, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"arrival_s": 0.0, "prompt": 10, "output": 1, **request_})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda some: [], "returned 0 numbers for 1 sequences"),
        (lambda some: [11], "11 tokens for sequence 0, which has 10 tokens of its prompt left"),
        (lambda some: [0], "gave no tokens to any of 1 sequences"),
        (
            lambda some: [2 if not g.prompt_left else 10 for g in some],
            "which generates one token per step",
        ),
    ],
)
def test_the_queue_rejects_an_impossible_schedule(schedule, message):
    with pytest.raises(ValueError, match=message):
        simulate_queue(SERVER, [Request(0.0, 10, 3)], schedule)


def test_the_queue_rejects_what_it_cannot_serve():
    with pytest.raises(ValueError, match="larger than the server's entire cache"):
        simulate_queue(SERVER, [Request(0.0, 10_000_000, 1)], whole_prompts)
    with pytest.raises(ValueError, match="servers with one stage, got pp=2"):
        simulate_queue(Server(LLAMA["8B"], pp=2), [], whole_prompts)
