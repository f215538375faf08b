"""Typical mistakes in lesson 13's exercises, and what the learner must be told."""

from wrong_answers import template

_ROWS = """
class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        {backward}


def row_linear(x, weight, bias):
    return {result}
"""


def _share(*entries):
    """Return a plan with these entries, which may use ``prepare(placements)``, WHOLE and SUM."""
    return f"""
WHOLE, SUM = Replicate(), Partial()

def prepare(*layouts):
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)

my_plan = {{**first_plan, {", ".join(entries)}}}
"""


_loss = template(
    """
def split_loss(logits, targets):
    part = logits.size(1)
    largest = logits.detach().amax(1)
    {largest}
    shifted = logits - largest[:, None]
    total = {total}
    own = targets - dist.get_rank() * part
    here = (own >= 0) & (own < part)
    picked = shifted.gather(1, own.clamp(0, part - 1)[:, None])[:, 0] * here
    return {result}
""",
    largest="dist.all_reduce(largest, dist.ReduceOp.MAX)",
    total="Leave.apply(shifted.exp().sum(1))",
    result="(total.log() - Leave.apply(picked)).mean()",
)


_far = template(
    """
def layer_times(split_s, whole_s, host_s, size_bytes):
    times_s = {{}}
    for n in (1, 2, 4, 8):
        sent_s = 2 * (n - 1) / n * size_bytes / (0.8 * 450e9) + 2 * (n - 1) * 5e-6
        times_s[n] = {time}
    return {result}
""",
    result="times_s",
)


WRONG = {
    "13.1": [
        (
            _ROWS.format(
                backward="return gradient", result="SumForward.apply(F.linear(x, weight, bias))"
            ),
            "Only the bias is wrong",
        ),
        (
            "def row_linear(x, weight, bias):\n    return F.linear(x, weight) + bias",
            "one part of the sum",
        ),
        (
            _ROWS.format(
                backward="total = gradient.clone(); dist.all_reduce(total); return total",
                result="SumForward.apply(F.linear(x, weight)) + bias",
            ),
            "2 times too large",
        ),
        (
            """
def row_linear(x, weight, bias):
    total = F.linear(x, weight).detach()
    dist.all_reduce(total)
    return total + bias
""",
            "the sum has no backward",
        ),
        (
            "def row_linear(x, weight, bias):\n"
            "    total = F.linear(x, weight)\n"
            "    dist.all_reduce(total)\n"
            "    return total + bias",
            "put it into an autograd.Function",
        ),
        (
            _ROWS.format(
                backward="return gradient",
                result="SumForward.apply(F.linear(x, weight, bias / dist.get_world_size()))",
            ),
            "2 times too small",
        ),
        (
            """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return sum(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def row_linear(x, weight, bias):
    return Gather.apply(F.linear(x, weight)) + bias
""",
            "over budget",
        ),
        ("def row_linear(x, weight, bias):\n    return F.linear(x, weight)[:1]", "(B, O)"),
    ],
    "13.2": [
        (_share(), "Nothing is shared yet"),
        (_share('"attention": prepare(WHOLE, None, None)'), "gate and up still make two"),
        (_share('"feed_forward": prepare(WHOLE)'), "still make three DTensors"),
        (
            _share('"attention": prepare(WHOLE)', '"feed_forward": prepare(WHOLE)'),
            "three inputs, x, cos and sin",
        ),
        (
            _share('"attention": prepare(*3 * [WHOLE])', '"feed_forward": prepare(WHOLE)'),
            "None leaves cos and sin as they are",
        ),
        (
            _share('"attention_norm": prepare(WHOLE)', '"feed_forward_norm": prepare(WHOLE)'),
            "only where it enters attention or feed_forward",
        ),
        (
            _share(
                '"attention": prepare(WHOLE, None, None)', '"feed_forward": prepare(WHOLE)'
            ).replace("desired_input_layouts=", "use_local_output=True, desired_input_layouts="),
            "make x a DTensor",
        ),
        (
            _share('"attention": prepare(SUM, None, None)', '"feed_forward": prepare(SUM)').replace(
                "desired_input_layouts=layouts", "desired_input_layouts=(WHOLE, *layouts[1:])"
            ),
            "declared with a placement that it doesn't have",
        ),
        (
            _share(
                '"attention": prepare(Shard(-1), None, None)', '"feed_forward": prepare(Shard(-1))'
            ).replace(
                "desired_input_layouts=layouts", "desired_input_layouts=(WHOLE, *layouts[1:])"
            ),
            "doesn't get the part that it expects",
        ),
        (
            _share('"attention": prepare(WHOLE, None, None)').replace("**first_plan,", ""),
            "first_plan splits them",
        ),
        (_share('"blocks.*.feed_forward": prepare(WHOLE)'), "If no module has that name"),
        ("my_plan = [ColwiseParallel()]", "Start with {**first_plan"),
    ],
    "13.3": [
        ("mended = faulty", "The block doesn't run"),
        ('mended = {**faulty, "attention.output": RowwiseParallel()}', "pairs the wrong ones"),
        (
            """
mended = {
    **faulty,
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.output": RowwiseParallel(),
}
""",
            "more than once",
        ),
        (
            """
mended = {
    name: style
    for name, style in plan.items()
    if not name.startswith("feed_forward")
}
""",
            "have no entry in the plan",
        ),
        (
            """
gathered = ColwiseParallel(output_layouts=Replicate())
mended = {
    **plan,
    "feed_forward.gate": gathered,
    "feed_forward.up": gathered,
    "feed_forward.down": RowwiseParallel(input_layouts=Replicate()),
}
""",
            "only to be split again",
        ),
        ('mended = {**faulty, "attention.keys": ColwiseParallel()}', "If no module has that name"),
        ("mended = [ColwiseParallel()]", "Start with {**faulty"),
    ],
    "13.4": [
        (_loss(largest="pass"), "the same largest logit"),
        (_loss(largest="largest = torch.zeros_like(largest)"), "exp overflows"),
        *((_loss().replace("amax(1)", shift), "exp overflows") for shift in ("mean(1)", "amin(1)")),
        (
            # One index too many at the front.
            _loss().replace("own >= 0", "own >= -1"),
            "one rank has it, and all others",
        ),
        (_loss(result="(total.log() - Leave.apply(picked)).sum()"), "return the mean"),
        (
            """
def split_loss(logits, targets):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return F.cross_entropy(torch.cat(parts, 1), targets)
""",
            "over budget",
        ),
        (
            _loss(total="shifted.exp().sum(1); dist.all_reduce(total)"),
            "put it into an autograd.Function",
        ),
        (
            _loss(total="Leave.apply(Enter.apply(shifted).exp().sum(1))"),
            "pass its gradient back unchanged",
        ),
        (
            "def split_loss(logits, targets):\n"
            "    return F.cross_entropy(logits, targets % logits.size(1), reduction='none')",
            "a zero-dimensional tensor",
        ),
    ],
    "13.5": [
        (_far(time="(split_s + whole_s) / n + 4 * sent_s * (n > 1)"), "doesn't shrink"),
        (_far(time="split_s / n + whole_s + 4 * sent_s * (n > 1)"), "host isn't done"),
        (_far(time="max(host_s, (split_s + whole_s) / n)"), "there are four"),
        (
            _far(time="host_s + split_s / n + whole_s + 4 * sent_s * (n > 1)"),
            "the longer of the two times counts",
        ),
        (
            _far(time="max(host_s, split_s / n + whole_s + 4 * sent_s * n / max(n - 1, 1))"),
            "2(n - 1)/n of a tensor",
        ),
        (
            _far(time="max(host_s, split_s / n + whole_s + 4 * sent_s * (n > 1))").replace(
                "+ 2 * (n - 1) * 5e-6", "+ (n - 1) * 5e-6"
            ),
            "2(n - 1) steps adds its latency",
        ),
        (_far(time="host_s", result="list(times_s.values())"), "Return a dict"),
    ],
}
