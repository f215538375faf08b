"""Lesson 12: why sharded training equals one process, and where its bytes and time go."""

from broken_claims import Broken

# What's trained doesn't matter for a checkpoint's contents.
_THREE_STEPS = [
    ('on_gpus_of(12, "fsdp", 56, folder)', 'on_gpus_of(12, "fsdp", 3, folder)'),
    ("assert 4 < losses[0] < 5.2 and losses[-10:].mean() < 2\n", ""),
]
BROKEN = [
    Broken(
        "F01",
        "the optimizer keeps no moments",
        old="torch.optim.Adam([master], foreach=False)",
        new="torch.optim.SGD([master], lr=0.1)",
    ),
    Broken(
        "F02",
        "the optimizer state is never sharded",
        old="ways = world_size if cause in cut_causes else 1",
        new='ways = world_size if cause in cut_causes and cause != "optimizer state" else 1',
    ),
    Broken(
        "F03",
        "the all-gather is left out",
        expensive=True,
        old="        dist.all_gather_single(joined, part)",
        new="        joined[: len(part)] = part",
    ),
    Broken(
        "F04",
        "stage 1 calls all_reduce",
        expensive=True,
        old="            shard.grad = averaged_part(p.grad)\n            p.grad = None",
        new="            dist.all_reduce(p.grad)\n"
        "            shard.grad = part_of(p.grad) / dist.get_world_size()\n"
        "            p.grad = None",
    ),
    Broken(
        "F04",
        "stage 3 does not free what it gathers",
        expensive=True,
        old="        p.grad = None\n        p.untyped_storage().resize_(0)\n\n    def step",
        new="        p.grad = None\n\n    def step",
    ),
    Broken(
        "F04",
        "ranks do not start from the same parameters",
        expensive=True,
        old="        dist.broadcast(p.data, src=0)\n    count, trainer",
        new="        pass\n    count, trainer",
    ),
    Broken(
        "F05",
        "ranks do not start from the same parameters",
        expensive=True,
        old="        dist.broadcast(p.data, src=0)\n    for layer in net:",
        new="        pass\n    for layer in net:",
    ),
    Broken(
        "F06",
        "the DDP model is sharded as well",
        expensive=True,
        cell="out-of-memory",
        old='DDP(gpt_on(gpu, LETTERS)) if how == "ddp" else ',
        new="",
    ),
    Broken(
        "F07",
        "the parts are not wrapped",
        expensive=True,
        old="(model.embedding, *model.blocks, model.output, model)",
        new="(model,)",
    ),
    Broken(
        "F08",
        "parameters are freed after forward anyway",
        expensive=True,
        old="reshard_after_forward=reshard)",
        new="reshard_after_forward=True)",
    ),
    Broken("F09", "the host always waits", expensive=True, old="if waits else ()", new=""),
    Broken(
        "F09",
        "the host does not wait",
        expensive=True,
        old="lambda *_: torch.accelerator.synchronize()",
        new="lambda *_: None",
    ),
    Broken(
        "F10",
        "both sums are computed in float32",
        expensive=True,
        old="mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)",
        new="mp_policy=MixedPrecisionPolicy()",
    ),
    Broken(
        "F10",
        "there is no mixed-precision policy",
        expensive=True,
        old="gpt_on(my_gpu(), LETTERS, partial(shard_each, mp_policy=BF16))",
        new="gpt_on(my_gpu(), LETTERS, shard_each)",
    ),
    Broken(
        "F11",
        "the optimizer is created after fully_shard",
        expensive=True,
        old="optimizer = early if optimizer_first else make_adam(net.parameters())",
        new="optimizer = make_adam(net.parameters())",
    ),
    Broken(
        "F12",
        "nothing is loaded",
        expensive=True,
        shorter=_THREE_STEPS,
        old="    dcp.load(state, checkpoint_id=folder)\n    set_state",
        new="    set_state",
    ),
    Broken(
        "F13",
        "each rank computes the norm of its own part",
        expensive=True,
        old="nn.utils.clip_grad_norm_(net.parameters(), 1e-3).full_tensor().item()",
        new="own",
    ),
    Broken(
        "F14",
        "hybrid sharding is not hybrid",
        expensive=True,
        old='("hosts", "gpus")) if hybrid',
        new='("hosts", "gpus")) if False',
    ),
    Broken(
        "F15",
        "gradients are reduced after each micro-batch",
        expensive=True,
        old="set_requires_gradient_sync(reduce_each or micro_batch == 3)",
        new="set_requires_gradient_sync(True)",
    ),
    Broken(
        "F16",
        "a sharded rank computes fewer samples",
        expensive=True,
        old="    model(tokens).sum().backward()  # the first step",
        new="    tokens = tokens if reshard is None else tokens[:4]\n"
        "    model(tokens).sum().backward()  # the first step",
    ),
    Broken(
        "F17",
        "FSDP computes and sends in float32, DDP does not",
        expensive=True,
        old="in_bf16, in_fp32 = partial(shard_each, mp_policy=BF16)",
        new="in_bf16, in_fp32 = shard_each",
    ),
    Broken(
        "F18",
        "all ranks run the same number of forwards",
        old="range(batches_of[rank])",
        new="range(2)",
    ),
]
