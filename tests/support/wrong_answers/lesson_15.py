"""Typical mistakes in lesson 15's exercises, and what the learner must be told."""

from wrong_answers import template

_envelope = template(
    """
def back_of_envelope(parameters, layers, width, sequence, tokens, gpus, flop_per_s, mfu):
    flop_per_token = {flop}
    seconds = flop_per_token * tokens / ({speed})
    return {days}, {state}
""",
    flop="6 * parameters + 12 * layers * width * sequence",
    speed="gpus * flop_per_s * mfu",
    days="seconds / 86_400",
    state="16 * parameters / gpus",
)


_interval = template(
    """
def best_interval(checkpoint_s, gpus, gpu_years):
    between_failures_s = gpu_years * 365 * 86_400{gpus}
    return {interval}
""",
    gpus=" / gpus",
)

_defend = template(
    """
def defend(sizes, sequence, gpus, gpus_per_host, gpu, network):
    plan = Plan(sizes, Layout({layout}), batch={batch}, sequence=sequence, recompute="{recompute}",
                gpu=gpu, gpus_per_host=gpus_per_host, network=network)
    tokens_per_s = {speed} * plan.spec.tensor_flop_per_s / estimate.flop_per_token(sizes, sequence)
    return plan, {state}, tokens_per_s
""",
    layout="dp_shard=gpus",
    batch=1,
    recompute="full",
    speed="0.5 / (4 / 3)",
    state="12 * sizes.parameters / gpus",
)


WRONG = {
    "15.1": [
        (_envelope(flop="6 * parameters"), "Attention is missing"),
        (_envelope(flop="2 * parameters + 4 * layers * width * sequence"), "backward takes twice"),
        (_envelope(flop="6 * parameters + 4 * layers * width * sequence"), "it's 12, not 4"),
        (_envelope(flop="6 * parameters + 6 * layers * width * sequence"), "it's 12, not 6"),
        (_envelope(days="seconds"), "a day has 86,400"),
        (_envelope(days="seconds / 3600"), "a day has 24"),
        (_envelope(speed="gpus * flop_per_s"), "No GPU reaches its peak"),
        (_envelope(speed="flop_per_s * mfu"), "all GPUs compute together"),
        (_envelope(state="16 * parameters"), "divide by the number of GPUs"),
        (_envelope(state="4 * parameters / gpus"), "4 of the 16 bytes"),
        (_envelope(state="12 * parameters / gpus"), "Gradients are missing"),
        (_envelope(state="16 * parameters / gpus / 2**30"), "These are GiB"),
        (_envelope(days="tokens"), "in days"),
        (_envelope().replace("return seconds / 86_400,", "return"), "Return days, state_bytes"),
    ],
    "15.2": [
        ("my_plan = 64", "Layout(dp_shard="),
        ('my_plan = Plan(LLAMA["8B"], Layout(dp_shard=64))', "the plan must match the task"),
        ('my_plan = Plan(LLAMA["70B"], Layout(dp_shard=32))', "equal the number of GPUs"),
        ('my_plan = Plan(LLAMA["70B"], Layout(dp_shard=32, pp=2), 2)', "A pipeline may well"),
        ('my_plan = Plan(LLAMA["70B"], Layout(dp_shard=64))', "more recomputation"),
        (
            'my_plan = Plan(LLAMA["70B"], Layout(dp_shard=64), recompute="full", '
            "reshard_after_forward=False)",
            "gathered parameters stay until backward",
        ),
        (
            'my_plan = Plan(LLAMA["70B"], Layout(dp_shard=8, tp=8), batch=8, recompute="full")',
            "a smaller tp",
        ),
        # The faster one of guess 15c, copied.
        (
            'my_plan = Plan(LLAMA["70B"], Layout(dp_shard=64), batch=1, recompute="full")',
            "more sequences spread the update",
        ),
        (
            'my_plan = Plan(LLAMA["70B"], Layout(dp_shard=32, tp=2), batch=4, recompute="full")',
            "do these layers have to be split",
        ),
    ],
    "15.3": [
        (
            _interval(gpus="", interval="math.sqrt(2 * checkpoint_s * between_failures_s)"),
            "That's for one GPU",
        ),
        (_interval(interval="math.sqrt(checkpoint_s * between_failures_s)"), "a factor of 2"),
        (_interval(interval="between_failures_s"), "fit many checkpoints"),
        (_interval(interval="2 * checkpoint_s * between_failures_s"), "The square root is missing"),
        (_interval(interval="checkpoint_s"), "Too often"),
        (_interval(interval="between_failures_s / 2"), "Too rarely"),
    ],
    "15.4": [
        (_defend(state="16 * sizes.parameters / gpus"), "12 bytes, not 16"),
        (_defend(state="12 * sizes.parameters"), "Divide by the number of GPUs"),
        (_defend(state="'8 GiB'"), "a Plan and two numbers"),
        (_defend(speed="1.0"), "the full peak"),
        (_defend(speed="0.5"), "by 5/4"),
        (_defend(speed="0.375 * gpus"), "one GPU, not of all"),
        (_defend(layout="dp_replicate=gpus", state="12 * sizes.parameters"), "A larger dp_shard"),
        (_defend(layout="dp_shard=gpus // 2"), "equal the number of GPUs"),
        # One recipe for every cluster: too few tokens to hide the gathers, too much for a GPU, or
        # too many hosts that wait.
        (_defend(), "more tokens per GPU"),
        (_defend(batch=4), "a larger tp"),
        (
            _defend(layout="dp_shard=gpus // 4, tp=4", batch=4, speed="0.44 / (4 / 3)"),
            "a smaller tp",
        ),
        (
            "def defend(sizes, sequence, gpus, gpus_per_host, gpu, network):\n    return 1, 2, 3",
            "The plan comes first",
        ),
    ],
}
