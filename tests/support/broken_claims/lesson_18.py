"""Lesson 18: caches that forget, ranks that don't add, GPUs that read for free, servers that wait."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "K01",
        "new tokens do not see what is cached",
        expensive=True,
        old=".tril(known - new)",
        new=".tril(0)",
    ),
    Broken(
        "K01",
        "the cache is never used",
        expensive=True,
        old="        if not keep:  # forget",
        new="        if True:  # forget",
    ),
    Broken(
        "K02",
        "every query head has its own key",
        expensive=True,
        old="on_paper = 2 * LETTERS.layers * heads",
        new="on_paper = 2 * LETTERS.layers * LETTERS.heads",
    ),
    Broken(
        "K03",
        "decoding processes the whole prompt again",
        old="server.decode_s(1, 4096) / other.decode_s(1, 4096)",
        new="server.prefill_s(4097) / other.prefill_s(4097)",
    ),
    Broken(
        "K04",
        "every user has separate weights",
        before="""
one_s = Server.decode_s
patch("vgpu.plan.serving.Server.decode_s", lambda self, batch, context: batch * one_s(self, 1, context))
""",
    ),
    Broken(
        "K05",
        "every rank has the first rank's heads",
        expensive=True,
        old="        parallelize_module(block, mesh, SPLIT)  # folded",
        new="        for layer in (block.attention.query, block.attention.key, block.attention.value):\n"
        "            layer.weight.copy_(layer.weight[: layer.out_features // world_size].repeat(world_size, 1))\n"
        "        parallelize_module(block, mesh, SPLIT)  # folded",
    ),
    Broken(
        "K06",
        "the cache is gathered, too",
        expensive=True,
        old="    return attention.output(seen",
        new="    if dist.is_initialized():\n        dist.all_reduce(key.contiguous().clone())\n    return attention.output(seen",
    ),
    Broken(
        "K07",
        "the cache takes no memory",
        before='patch("vgpu.plan.serving.Server.cache_bytes_per_token", 1)\n',
    ),
    Broken(
        "K08",
        "stages do not wait for each other",
        expensive=True,
        before="""
whole_s = Server.decode_s
patch("vgpu.plan.serving.Server.decode_s", lambda self, *a: whole_s(self, *a) / self.pp)
""",
    ),
    Broken(
        "K08",
        "both stages have the first layer",
        expensive=True,
        old="stage.blocks[rank : rank + 1], tokens",
        new="stage.blocks[:1], tokens",
    ),
    Broken(
        "K09",
        "the A100s' memory is twice as fast",
        old="memory_bandwidth_bytes_per_s=2.039e12",
        new="memory_bandwidth_bytes_per_s=4.078e12",
        cell="published-one-user",
    ),
    Broken(
        "K09",
        "the H200s' rows are predicted for H100s",
        old="gpu=gpu) / speed",
        new='gpu="H100") / speed',
        cell="published-others",
    ),
    Broken(
        "K10",
        "continuous batching also waits for the whole batch",
        old="def continuous(requests, server=four):\n    return simulate_queue(server, requests, whole_prompts)",
        new="def continuous(requests, server=four):\n"
        "    return simulate_queue(server, requests, whole_prompts, static=True)",
    ),
    Broken(
        "K11",
        "chunks are as long as the prompt",
        old="simulate_queue(server, requests, chunked_prefill(budget))",
        new="simulate_queue(server, requests, chunked_prefill(20_000))",
    ),
    Broken(
        "K12",
        "prompts stay on the GPUs that generate",
        expensive=True,
        old='    "separate GPUs": separate,\n}',
        new='    "separate GPUs": partial(on_two, continuous),\n}',
    ),
    Broken(
        "K13",
        "the server keeps its first weights",
        expensive=True,
        old="local(copy).copy_(local(parameter))",
        new="pass",
    ),
]
