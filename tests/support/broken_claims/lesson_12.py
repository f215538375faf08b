"""Lesson 12: what makes sharded training equal to one process, and where its bytes and seconds go."""

from broken_claims import Broken

# What's trained doesn't matter for a checkpoint's contents.
_THREE_STEPS = [
    ('on_gpus_of(12, "fsdp", 56, folder)', 'on_gpus_of(12, "fsdp", 3, folder)'),
    ("assert 4 < losses[0] < 5.2 and losses[-10:].mean() < 2\n", ""),
]
BROKEN = [
    Broken(
        "F01",
        "the optimizer keeps no averages",
        edits=[
            ("torch.optim.Adam([master], foreach=False)", "torch.optim.SGD([master], lr=0.1)"),
        ],
    ),
    Broken(
        "F02",
        "the optimizer's state is never cut",
        edits=[
            (
                "ways = world_size if cause in cut_causes else 1",
                'ways = world_size if cause in cut_causes and cause != "optimizer state" else 1',
            )
        ],
    ),
    Broken(
        "F03",
        "the second half is left out",
        edits=[
            (
                "        dist.all_gather_single(joined, part)",
                "        joined[: len(part)] = part",
            )
        ],
    ),
    Broken(
        "F04",
        "stage 1 sends an all-reduce",
        expensive=True,
        edits=[
            (
                "            shard.grad = averaged_part(p.grad)\n            p.grad = None",
                "            dist.all_reduce(p.grad)\n"
                "            shard.grad = part_of(p.grad) / dist.get_world_size()\n"
                "            p.grad = None",
            )
        ],
    ),
    Broken(
        "F04",
        "stage 3 does not free what it has gathered",
        expensive=True,
        edits=[
            (
                "        p.grad = None\n        p.untyped_storage().resize_(0)\n\n    def step",
                "        p.grad = None\n\n    def step",
            )
        ],
    ),
    Broken(
        "F04",
        "ranks do not start from the same parameters",
        expensive=True,
        edits=[
            (
                "        dist.broadcast(p.data, src=0)\n    count, trainer",
                "        pass\n    count, trainer",
            )
        ],
    ),
    Broken(
        "F05",
        "ranks do not start from the same parameters",
        expensive=True,
        edits=[
            (
                "        dist.broadcast(p.data, src=0)\n    for layer in net:",
                "        pass\n    for layer in net:",
            )
        ],
    ),
    Broken(
        "F06",
        "what should be DDP is sharded as well",
        expensive=True,
        cell="out-of-memory",
        edits=[('DDP(gpt_on(gpu, LETTERS)) if how == "ddp" else ', "")],
    ),
    Broken(
        "F07",
        "the parts are not wrapped",
        expensive=True,
        edits=[("(model.embedding, *model.blocks, model.output, model)", "(model,)")],
    ),
    Broken(
        "F08",
        "parameters are freed after forward all the same",
        expensive=True,
        edits=[("reshard_after_forward=reshard)", "reshard_after_forward=True)")],
    ),
    Broken(
        "F09",
        "the host always waits",
        expensive=True,
        edits=[("if waits else ()", "")],
    ),
    Broken(
        "F09",
        "the host does not wait",
        expensive=True,
        edits=[("lambda *_: torch.accelerator.synchronize()", "lambda *_: None")],
    ),
    Broken(
        "F10",
        "both sums are in float32",
        expensive=True,
        edits=[
            (
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)",
                "mp_policy=MixedPrecisionPolicy()",
            )
        ],
    ),
    Broken(
        "F10",
        "there is no policy",
        expensive=True,
        edits=[
            (
                "gpt_on(my_gpu(), LETTERS, partial(shard_each, mp_policy=BF16))",
                "gpt_on(my_gpu(), LETTERS, shard_each)",
            )
        ],
    ),
    Broken(
        "F11",
        "the optimizer is made after fully_shard",
        edits=[
            (
                "optimizer = early if optimizer_first else make_adam(net.parameters())",
                "optimizer = make_adam(net.parameters())",
            )
        ],
    ),
    Broken(
        "F12",
        "nothing is loaded",
        expensive=True,
        shorter=_THREE_STEPS,
        edits=[("    dcp.load(state, checkpoint_id=folder)\n    set_state", "    set_state")],
    ),
    Broken(
        "F13",
        "each rank takes the norm of its part",
        expensive=True,
        edits=[("nn.utils.clip_grad_norm_(net.parameters(), 1e-3).full_tensor().item()", "own")],
    ),
    Broken(
        "F14",
        "hybrid sharding is not hybrid",
        expensive=True,
        edits=[('("hosts", "gpus")) if hybrid', '("hosts", "gpus")) if False')],
    ),
    Broken(
        "F15",
        "gradients are reduced after each micro-batch",
        expensive=True,
        edits=[
            (
                "set_requires_gradient_sync(reduce_each or micro_batch == 3)",
                "set_requires_gradient_sync(True)",
            )
        ],
    ),
    Broken(
        "F16",
        "a sharded rank computes fewer samples",
        expensive=True,
        edits=[
            (
                "    model(tokens).sum().backward()  # the first step",
                "    tokens = tokens if reshard is None else tokens[:4]\n"
                "    model(tokens).sum().backward()  # the first step",
            )
        ],
    ),
    Broken(
        "F17",
        "FSDP computes and sends in float32, DDP does not",
        expensive=True,
        edits=[
            (
                "in_bf16, in_fp32 = partial(shard_each, mp_policy=BF16)",
                "in_bf16, in_fp32 = shard_each",
            )
        ],
    ),
    Broken(
        "F18",
        "all ranks run as many forwards",
        edits=[("range(batches_of[rank])", "range(2)")],
    ),
]
