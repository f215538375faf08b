"""Typical mistakes in the exam's tasks, and what the verdict must say."""

from wrong_answers import exam_on_ranks

_ELSEWHERE = """
def elsewhere(model, device):
    {first}
    return [name for name, tensor in {named} if {test}]
"""
_CURRENT = "device = torch.empty(0, device=device).device"
_BOTH = "[*model.named_parameters(), *model.named_buffers()]"

_ROUNDED = "def rounded(x, step):\n    {before}\n    return {result}"

_UPDATE = """
{decorator}
def update(average, model, decay):
    for old, new in zip({of_average}, {of_model}):
        {change}
"""

_STATISTICS = """
def statistics(x, gpu_count, momentum):
    first = {first}
    return {mean}, {variance}
"""
_MEAN = "momentum * first.mean(0)"
_VARIANCE = "(1 - momentum) + momentum * first.var(0)"

_REMAINING = """
def remaining(order, done, rank, world_size, batch_size):
    together = world_size * batch_size
    rest = {rest}
    return {result}
"""

_MAKESPAN = """
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
"""
_NEEDS = '[("F", i, s), ("B", i, s + 1)]'

_BATCH = """
def largest_batch(peak, budget_bytes):
    few, many = {sizes}
    low, high = peak(few), peak(many)
    per_sample = max((high - low) / (many - few), 1)
    return int(many + (budget_bytes - high) / per_sample) - 1
"""

WRONG = {
    "99.1": [
        (
            _ELSEWHERE.format(
                first=_CURRENT, named="model.named_parameters()", test="tensor.device != device"
            ),
            "more tensors than its parameters",
        ),
        (
            _ELSEWHERE.format(first="pass", named=_BOTH, test="tensor.device != device"),
            "equals no tensor's device",
        ),
        (
            _ELSEWHERE.format(first="pass", named=_BOTH, test="tensor.device.type != device.type"),
            "Some are missing",
        ),
        (
            _ELSEWHERE.format(
                first=_CURRENT, named="model.state_dict().items()", test="tensor.device != device"
            ),
            "persistent=False",
        ),
    ],
    "99.2": [
        (_ROUNDED.format(before="", result="torch.round(x / step) * step"), "gradient 0"),
        (_ROUNDED.format(before="", result="torch.round(x.detach() / step) * step"), "Detach the"),
        (
            _ROUNDED.format(before="x.data = torch.round(x.data / step) * step", result="x * 1"),
            "everyone else reads",
        ),
        (_ROUNDED.format(before="", result="x + (torch.round(x) - x).detach()"), "nearest ones"),
        (
            "class Rounded(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x, step):\n"
            "        return torch.round(x / step) * step\n\n"
            "    @staticmethod\n"
            "    def backward(ctx, gradient):\n"
            "        return gradient, None\n\n"
            + _ROUNDED.format(before="", result="Rounded.apply(x, step)"),
            "autograd does not see",
        ),
    ],
    "99.3": [
        (
            _UPDATE.format(
                decorator="",
                of_average="average.parameters()",
                of_model="model.parameters()",
                change="old.mul_(decay).add_(new.to(old.device), alpha=1 - decay)",
            ),
            "in-place operation",
        ),
        (
            _UPDATE.format(
                decorator="@torch.no_grad()",
                of_average="average.parameters()",
                of_model="model.parameters()",
                change="old.mul_(decay).add_(new.to(old.device), alpha=1 - decay)",
            ),
            "Buffers decide",
        ),
        (
            _UPDATE.format(
                decorator="@torch.no_grad()",
                of_average="average.parameters()",
                of_model="model.parameters()",
                change="old.mul_(1 - decay * 0.9).add_(new.to(old.device), alpha=decay)",
            ),
            "share of the old average",
        ),
        (
            _UPDATE.format(
                decorator="@torch.no_grad()",
                of_average="average.state_dict().values()",
                of_model="model.state_dict().values()",
                change="old.copy_(decay * old + (1 - decay) * new.to(old.device))",
            ),
            "Don't average a count",
        ),
    ],
    "99.4": [
        (_STATISTICS.format(first="x", mean=_MEAN, variance=_VARIANCE), "No GPU sees"),
        (
            _STATISTICS.format(first="x.chunk(gpu_count)[-1]", mean=_MEAN, variance=_VARIANCE),
            "Which replica",
        ),
        (
            _STATISTICS.format(
                first="x.chunk(gpu_count)[0]",
                mean=_MEAN,
                variance="(1 - momentum) + momentum * first.var(0, correction=0)",
            ),
            "unbiased",
        ),
        (
            _STATISTICS.format(first="x[: len(x) // gpu_count]", mean=_MEAN, variance=_VARIANCE),
            "how many samples",
        ),
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
            "the first ones of the order",
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
        (
            _MAKESPAN.format(
                backward_needs='[("F", i, s)]', stuck="return None", result="max(free_s)"
            ),
            "that of the next stage",
        ),
        (
            _MAKESPAN.format(
                backward_needs='[("B", i, s + 1)]', stuck="return None", result="max(free_s)"
            ),
            "before its own forward",
        ),
        (
            _MAKESPAN.format(
                backward_needs=_NEEDS, stuck="return max(free_s)", result="max(free_s)"
            ),
            "waits for the other",
        ),
        (
            _MAKESPAN.format(backward_needs=_NEEDS, stuck="return None", result="sum(free_s)"),
            "when the last GPU is done",
        ),
    ],
    "99.8": [
        (
            "def largest_batch(peak, budget_bytes):\n"
            "    return int(budget_bytes / (peak(1500) / 1500))",
            "grows with it",
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
        ("def largest_batch(peak, budget_bytes):\n    return 1500", "grows with it"),
    ],
} | exam_on_ranks.WRONG
