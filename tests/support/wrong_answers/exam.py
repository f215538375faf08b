"""Typical mistakes in the exam's tasks, and what the verdict must say."""

from wrong_answers import exam_on_ranks, template

_elsewhere = template(
    """
def elsewhere(model, device):
    {first}
    return [name for name, tensor in {named} if {test}]
""",
    first="device = torch.empty(0, device=device).device",
    named="[*model.named_parameters(), *model.named_buffers()]",
    test="tensor.device != device",
)

_ROUNDED = "def rounded(x, step):\n    {before}\n    return {result}"

_UPDATE = """
{decorator}
def update(average, model, decay):
    for old, new in zip({of_average}, {of_model}):
        {change}
"""


def _update(
    change="old.mul_(decay).add_(new.to(old.device), alpha=1 - decay)",
    of="{}.parameters()",
    decorator="@torch.no_grad()",
):
    return _UPDATE.format(
        decorator=decorator,
        of_average=of.format("average"),
        of_model=of.format("model"),
        change=change,
    )


_statistics = template(
    """
def statistics(x, gpu_count, momentum):
    first = {first}
    return {mean}, {variance}
""",
    first="x.chunk(gpu_count)[0]",
    mean="momentum * first.mean(0)",
    variance="(1 - momentum) + momentum * first.var(0)",
)

_waits = template(
    """
def waits_us(rows):
    starts = {{}}
    for row in {rows}:
        if {counts}:
            starts.setdefault(row["pid"] % 1000, []).append(row["ts"])
    {last}
    return [{wait} for rank in range(len(starts))]
""",
    rows='sorted(rows, key=lambda row: row["ts"])',
    counts='row["cat"] == "kernel" and row["name"].startswith("nccl")',
    last="last = [max(times) for times in zip(*starts.values())]",
    wait="sum(last) - sum(starts[rank])",
)


_sent = template(
    """
def sent(gradients, compress):
    messages, rest = [], 0
    for gradient in gradients:
        whole = {whole}
        messages.append({message})
        rest = {rest}
    return messages
""",
    whole="gradient + rest",
    message="compress(whole)",
    rest="whole - messages[-1].float()",
)


_PAGES = """
def pages(prompts, size):
    full = {full}
    return len(full) + {others}
"""
_FULL = "{{tuple(p[:end]) for p in prompts for end in range(size, len(p){more}, size)}}"
_OTHERS = "sum(len(p) % size > 0 for p in prompts)"

_REMAINING = """
def remaining(order, done, rank, world_size, batch_size):
    together = world_size * batch_size
    rest = {rest}
    return {result}
"""

_makespan = template(
    """
def makespan(orders, forward_s, backward_s):
    ended, free_s, done = {{}}, [0] * len(orders), [0] * len(orders)
    while any(done[s] < len(order) for s, order in enumerate(orders)):
        before = sum(done)
        for s, order in enumerate(orders):
            while done[s] < len(order):
                kind, i = order[done[s]]
                needs = [("F", i, s - 1)] if kind == "F" else {backward_needs}
                needs = [need for need in needs if 0 <= need[2] < len(orders)]
                if any(need not in ended for need in needs):
                    break
                start_s = max([free_s[s], *(ended[need] for need in needs)])
                free_s[s] = start_s + (forward_s if kind == "F" else backward_s)
                ended[kind, i, s] = free_s[s]
                done[s] += 1
        if sum(done) == before:
            {stuck}
    return {result}
""",
    backward_needs='[("F", i, s), ("B", i, s + 1)]',
    stuck="return None",
    result="max(free_s)",
)


_BATCH = """
def largest_batch(peak, budget_bytes):
    few, many = {sizes}
    low, high = peak(few), peak(many)
    per_sample = max((high - low) / (many - few), 1)
    return int(many + (budget_bytes - high) / per_sample) - 1
"""

WRONG = {
    "99.1": [
        (_elsewhere(named="model.named_parameters()"), "other tensors besides its parameters"),
        (_elsewhere(first="pass"), "doesn't equal any tensor's device"),
        (_elsewhere(first="pass", test="tensor.device.type != device.type"), "Some are missing"),
        (_elsewhere(named="model.state_dict().items()"), "persistent=False"),
    ],
    "99.2": [
        (_ROUNDED.format(before="", result="torch.round(x / step) * step"), "a gradient of 0"),
        (
            _ROUNDED.format(before="", result="torch.round(x.detach() / step) * step"),
            "Detach only the",
        ),
        (
            _ROUNDED.format(before="x.data = torch.round(x.data / step) * step", result="x * 1"),
            "everyone else reads",
        ),
        (
            _ROUNDED.format(before="", result="x + (torch.round(x) - x).detach()"),
            "nearest multiples",
        ),
        (
            "class Rounded(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x, step):\n"
            "        return torch.round(x / step) * step\n\n"
            "    @staticmethod\n"
            "    def backward(ctx, gradient):\n"
            "        return gradient, None\n\n"
            + _ROUNDED.format(before="", result="Rounded.apply(x, step)"),
            "autograd doesn't see",
        ),
    ],
    "99.3": [
        (_update(decorator=""), "in-place operation"),
        (_update(), "Buffers, too, affect"),
        (
            _update("old.mul_(1 - decay * 0.9).add_(new.to(old.device), alpha=decay)"),
            "weight of the old average",
        ),
        (
            _update(
                "old.copy_(decay * old + (1 - decay) * new.to(old.device))",
                of="{}.state_dict().values()",
            ),
            "Don't average a count",
        ),
    ],
    "99.4": [
        (_statistics(first="x"), "No GPU sees"),
        (_statistics(first="x.chunk(gpu_count)[-1]"), "Which replica"),
        (
            _statistics(variance="(1 - momentum) + momentum * first.var(0, correction=0)"),
            "unbiased",
        ),
        (_statistics(first="x[: len(x) // gpu_count]"), "how many samples"),
    ],
    "99.6": [
        (
            _REMAINING.format(
                rest="order[done + rank :: world_size]",
                result="[rest[i : i + batch_size] for i in range(0, len(rest), batch_size)]",
            ),
            "next all-reduce",
        ),
        (
            _REMAINING.format(
                rest="order",
                result="[rest[i : i + together][rank::world_size]"
                " for i in range(0, len(rest), together)]",
            ),
            "the first samples in the order",
        ),
        (
            _REMAINING.format(
                rest="order[done:]",
                result="[rest[i : i + together][rank * batch_size :][:batch_size]"
                " for i in range(0, len(rest), together)]",
            ),
            "Spread the last few",
        ),
    ],
    "99.7": [
        (_makespan(backward_needs='[("F", i, s)]'), "needs the next stage's"),
        (_makespan(backward_needs='[("B", i, s + 1)]'), "before its own forward"),
        (_makespan(stuck="return max(free_s)"), "waits for the other"),
        (_makespan(result="sum(free_s)"), "when the last GPU is done"),
    ],
    "99.8": [
        (
            "def largest_batch(peak, budget_bytes):\n"
            "    return int(budget_bytes / (peak(1500) / 1500))",
            "grow with it",
        ),
        (_BATCH.format(sizes="1, 2"), "in the update"),
        (_BATCH.format(sizes="200, 1000"), "in the update"),
        (_BATCH.format(sizes="1000, 30_000"), "as the task says"),
        (
            "def largest_batch(peak, budget_bytes):\n"
            "    size = 1500\n"
            "    while peak(size) <= budget_bytes:\n"
            "        size += 500\n"
            "    return size - 500",
            "Two points determine a line",
        ),
        ("def largest_batch(peak, budget_bytes):\n    return 1500", "grow with it"),
    ],
    "99.11": [
        (_waits(rows="rows"), "Rows are in random order"),
        (_waits(counts='row["name"].startswith("nccl")'), "only kernels count"),
        (_waits(counts='row["cat"] == "kernel"'), "only kernels count"),
        (
            _waits(
                last="last = [min(times) for times in zip(*starts.values())]",
                wait="sum(starts[rank]) - sum(last)",
            ),
            "The last one doesn't wait",
        ),
        ("def waits_us(rows):\n    return 3", "Return a list of numbers"),
    ],
    "99.12": [
        (_sent(rest="0"), "The next step adds it"),
        (_sent(rest="rest + whole - messages[-1].float()"), "The next step adds it, once"),
        (_sent(rest="messages[-1].float() - whole"), "should have been sent and what was"),
        (_sent(rest="gradient - messages[-1].float()"), "should have been sent and what was"),
        (_sent(whole="gradient.add_(rest)"), "writes to the tensor"),
        (_sent(message="compress(whole).float()"), "what compress returns"),
        ("def sent(gradients, compress):\n    return []", "once per step"),
    ],
    "99.13": [
        (
            _PAGES.format(full="[]", others="sum(-(-len(p) // size) for p in prompts)"),
            "equal up to its end",
        ),
        (
            _PAGES.format(
                full="{tuple(p[end - size : end]) for p in prompts "
                "for end in range(size, len(p) + 1, size)}",
                others=_OTHERS,
            ),
            "Keys depend on all earlier tokens",
        ),
        (
            _PAGES.format(
                full="{tuple(p[: end + size]) for p in prompts for end in range(0, len(p), size)}",
                others="0",
            ),
            "full isn't shared",
        ),
        (_PAGES.format(full=_FULL.format(more=""), others=_OTHERS), "Eight tokens fill two pages"),
        (_PAGES.format(full=_FULL.format(more=" + 1"), others="0"), "need a page, too"),
    ],
} | exam_on_ranks.WRONG
