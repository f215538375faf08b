"""Server estimates: bytes match a real cache, and times match datasheets and a published result."""

import dataclasses

import pytest
import torch

import vgpu
from vgpu.plan.__main__ import main
from vgpu.plan.serving import (
    DEFAULT_COST,
    Request,
    Server,
    cache_bytes,
    chunked_prefill,
    report,
    simulate_queue,
    whole_prompts,
)
from vgpu.plan.transformer import LLAMA, Transformer, TransformerSizes

SMALL = TransformerSizes(4, 256, 8, 4, 512, 1024, sequence=128)


def test_weight_bytes_on_one_gpu_match_the_transformer():
    with torch.device("meta"):
        model = Transformer(SMALL).bfloat16()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    final_norm = 2 * SMALL.width
    assert Server(SMALL).weight_bytes == parameters - final_norm


def test_ranks_divide_weights_and_cache_until_key_value_heads_are_replicated():
    whole = Server(SMALL)
    norms = 4 * 2 * SMALL.width * 2
    four, eight = Server(SMALL, tp=4), Server(SMALL, tp=8)
    assert four.weight_bytes - norms == (whole.weight_bytes - norms) // 4
    assert whole.cache_bytes_per_token == cache_bytes(SMALL, 1) == 2 * 4 * 4 * 32 * 2
    assert four.cache_bytes_per_token == eight.cache_bytes_per_token == 2 * 4 * 1 * 32 * 2
    staged = Server(SMALL, pp=2, cache_bits=8)
    assert staged.cache_bytes_per_token == whole.cache_bytes_per_token // 4


def test_llama_70b_needs_two_h100s_and_405b_two_hosts_or_float8():
    assert not Server(LLAMA["70B"]).fits
    assert Server(LLAMA["70B"], tp=2).fits
    assert not Server(LLAMA["405B"], tp=8).fits
    assert Server(LLAMA["405B"], tp=8, pp=2).fits
    assert Server(LLAMA["405B"], tp=8, weight_bits=8).fits
    assert Server(LLAMA["70B"]).most_sequences(1) == 0


def test_a_decoding_step_reads_weights_and_caches():
    server = Server(LLAMA["8B"])
    bytes_per_s = 0.8 * server.cost.spec.memory_bandwidth_bytes_per_s
    embedding = 2 * LLAMA["8B"].vocabulary * LLAMA["8B"].width  # looked up, not read
    least_s = (server.weight_bytes - embedding) / bytes_per_s
    assert least_s < server.decode_s(1, 1) < 1.15 * least_s
    caches_s = 16 * 8000 * server.cache_bytes_per_token / bytes_per_s
    longer_s = server.decode_s(16, 8000) - server.decode_s(16, 1)
    assert longer_s == pytest.approx(caches_s, rel=0.01)


def test_prefill_computes_at_the_assumed_share_of_the_peak():
    server = Server(LLAMA["8B"])
    flop = 2 * 8192 * LLAMA["8B"].layers * LLAMA["8B"].block_products
    least_s = flop / (0.5 * server.cost.spec.tensor_flop_per_s)
    assert least_s < server.prefill_s(8192) < 1.4 * least_s


def test_a_forward_pass_sums_the_work_of_its_sequences():
    server = Server(LLAMA["8B"])
    assert server.forward_s([(1, 99)] * 4) == server.decode_s(4, 99)
    assert server.forward_s([(300, 0)]) == server.prefill_s(300)
    assert server.forward_s([(300, 0), (1, 99)]) > server.prefill_s(300)


def test_a_static_batch_takes_a_prefill_and_a_step_for_each_further_token():
    server = Server(LLAMA["8B"])
    prefill_s = server.forward_s([(300, 0)] * 4)
    steps_s = [server.forward_s([(1, context)] * 4) for context in range(300, 309)]
    assert server.generate_s(4, 300, 1) == prefill_s
    assert server.generate_s(4, 300, 10) == pytest.approx(prefill_s + sum(steps_s), rel=1e-3)


def test_small_all_reduces_are_one_shot_and_large_ones_use_a_ring():
    server = Server(LLAMA["70B"], tp=8)
    link, small, large = server.cost.link, 16_384, 2**28
    share = link.bandwidth_bytes_per_s * server.cost.link_share
    assert server.all_reduce_s(small) == pytest.approx(2 * link.latency_s + 7 * small / share)
    assert server.all_reduce_s(large) == server.cost.collective_time_s("all_reduce", large, 8)
    assert Server(LLAMA["70B"]).all_reduce_s(large) == 0
    two_hosts = Server(dataclasses.replace(LLAMA["405B"]), tp=16)
    assert two_hosts.all_reduce_s(small) == two_hosts.cost.group_time_s(
        "all_reduce", small, range(16)
    )


def test_stages_serve_groups_in_turn_and_make_no_token_faster():
    one, two = Server(LLAMA["8B"]), Server(LLAMA["8B"], pp=2)
    assert one.decode_s(1, 100) < two.decode_s(1, 100) < 1.01 * one.decode_s(1, 100)
    assert two.decode_s(64, 100) == pytest.approx(two.decode_s(32, 100) + 0, rel=0.1)
    assert two.tokens_per_s(64, 100, 100) > 1.7 * one.tokens_per_s(32, 100, 100)


def test_stages_on_two_hosts_send_over_the_network():
    server = Server(LLAMA["70B"], tp=8, pp=2)
    slow = server.with_costs(network="Ethernet 25")
    each_bytes = 64 * LLAMA["70B"].width * 2 / 8  # a rank sends an eighth of the hidden states
    slow_s, fast_s = (one.cost.group_time_s("send", each_bytes, (0, 8)) for one in (slow, server))
    work = [(1, 100)] * 64
    assert slow.forward_s(work) - server.forward_s(work) == pytest.approx(slow_s - fast_s)


def test_a_published_throughput_is_predicted_within_10_percent():
    # TensorRT-LLM 1.0, Llama 3.3 70B FP8, two H100s, 1000 tokens in and out: 4,205 tokens/s.
    server = Server(LLAMA["70B"], tp=2, weight_bits=8, cache_bits=8)
    assert server.tokens_per_s(server.most_sequences(2000), 1000, 1000) == pytest.approx(
        4205, rel=0.1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tp": 3},
            r"tp=3 ranks can't share a layer evenly \(heads: 32, feed-forward width: 14336",
        ),
        ({"pp": 33}, "pp=33 stages are too many for 32 layers"),
        ({"weight_bits": 4}, "weight_bits must be 8 or 16, got 4"),
        (
            {"weight_bits": 8, "cost": DEFAULT_COST.changed({"gpu": "A100"})},
            "A100-SXM4-40GB can't multiply float8 tensors",
        ),
    ],
)
def test_a_server_rejects_impossible_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Server(LLAMA["8B"], **options)


def test_with_costs_changes_the_gpu_together_with_its_link():
    server = Server(LLAMA["8B"]).with_costs(gpu="A100", memory_share=0.7)
    assert server.cost.link == vgpu.PRESETS["A100"].link
    assert server.cost.memory_share == 0.7


def test_the_report_says_what_fits_and_how_fast():
    text = report(Server(LLAMA["70B"], tp=4), 1000, 500)
    assert "tp 4 × pp 1 on 4 H100 80GB HBM3" in text
    assert "It fits." in text and "sequences of 1,000 + 500 tokens  342" in text
    assert "It does not fit: there is no room for a sequence of 1,500 tokens" in report(
        Server(LLAMA["70B"]), 1000, 500
    )


def test_the_command_prints_a_servers_report(capsys):
    main(["--serve", "--model", "70B", "--tp", "4", "--weight-bits", "8", "--prompt", "1000"])
    assert "It fits." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--serve --dp-shard 8 --batch 2", "--dp-shard, --batch: not used with --serve"),
        ("--prompt 100", "--prompt: only used with --serve"),
        ("--serve --tp 5", "tp=5 ranks can't share a layer evenly"),
        (
            "--serve --model 8x7B",
            "serving isn't modeled for models with experts: use sizes without",
        ),
        ("--gpus 64", "unrecognized arguments: --gpus 64"),  # isn't short for --gpus-per-host
    ],
)
def test_the_command_rejects_incompatible_options(capsys, line, message):
    with pytest.raises(SystemExit):
        main(line.split())
    assert message in capsys.readouterr().err


# Requests in a queue: when each token is ready under each schedule, and what's rejected

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
