"""Typical mistakes in lesson 11's exercises, and the message that each must get."""

from wrong_answers import template

_PEAK = (
    "def peak_bytes(sizes, batch_size, optimizer):\n"
    "    weights = [i * o + o for i, o in zip(sizes, sizes[1:])]\n"
    "    states = 2 if optimizer == 'adam' else 0\n"
    "    always = sum(weights) * (1 + states) + batch_size * (sizes[0] + 2)\n"
    "    hidden = sum(sizes[1:-1]) * batch_size\n"
    "    return {}"
)
_ACCUMULATE = (
    "def accumulate(parallel, micro_batches):\n"
    "    total = torch.tensor(sum(len(x) for x, _ in micro_batches))\n"
    "    {before}\n"
    "    for index, (x, y) in enumerate(micro_batches):\n"
    "        last = index == len(micro_batches) - 1\n"
    "        with nullcontext() if last else parallel.no_sync():\n"
    "            ({loss}).backward()"
)
_TOTAL = "dist.all_reduce(total)"
_SUM = "F.mse_loss(parallel(x), y, reduction='sum')"
_RIGHT = f"{_SUM} * dist.get_world_size() / total.item()"

_small = template(
    "def small_step(tower, x):\n"
    "    for part in {parts}:\n"
    "        output = checkpoint_sequential(tower, {segments}, part, use_reentrant=False)\n"
    "        (output.square().mean() / {factor}).backward()",
    parts="x.chunk(4)",
    segments="6",
    factor="4",
)

WRONG = {
    "11.1": [
        # The sum of all causes, as if all peaked at once.
        (_PEAK.format("4 * (always + sum(weights) + hidden)"), "The peak is in backward"),
        # Without the activations' gradients.
        (_PEAK.format("4 * (always + hidden)"), "In memory at that moment: parameters"),
        (
            # Right for backward, but without the update.
            _PEAK.format(
                "4 * (always + max(batch_size * (sum(sizes[1 : i + 2]) + 2 * sizes[i + 1])"
                " + sum(weights[i + 1 :]) for i in range(len(weights))))"
            ),
            "The peak is in update",
        ),
        (
            _PEAK.format("4 * (always + hidden + 2 * batch_size * max(sizes) + sum(weights))"),
            "The peak is in",
        ),
        (
            # The larger of two moments, one of which is underestimated.
            _PEAK.format("4 * (always + max(hidden, sum(weights) + states * max(weights)))"),
            "case 1 of 8",
        ),
        (
            _PEAK.format(
                "always + max(batch_size * (sum(sizes[1 : i + 2]) + 2 * sizes[i + 1])"
                " + sum(weights[i + 1 :]) for i in range(len(weights)))"
            ),
            "a float32 takes 4 bytes",
        ),
        (_PEAK.format("0"), "In memory at that moment"),
        (
            # Right, but not a prediction.
            "def peak_bytes(sizes, batch_size, optimizer):\n"
            "    (gpu,) = devices.lab(1)\n"
            "    layers = [m for i, o in zip(sizes, sizes[1:]) for m in (nn.Linear(i, o), nn.ReLU())]\n"
            "    model = nn.Sequential(*layers[:-1]).to(gpu)\n"
            "    x = torch.randn(batch_size, sizes[0], device=gpu)\n"
            "    torch.accelerator.reset_peak_memory_stats(gpu)\n"
            "    model(x).sum().backward()\n"
            "    return torch.accelerator.max_memory_allocated(gpu)",
            "no tensors",
        ),
        ("def peak_bytes(sizes, batch_size, optimizer):\n    return '1 MiB'", "a number of bytes"),
    ],
    "11.2": [
        (_ACCUMULATE.format(before="pass", loss="F.mse_loss(parallel(x), y)"), "of means"),
        (
            _ACCUMULATE.format(before="pass", loss=f"{_SUM} / total.item()"),
            "Not every sample has the same weight",
        ),
        (
            _ACCUMULATE.format(before=_TOTAL, loss=f"{_SUM} / total.item()"),
            "DDP divides by the number of ranks",
        ),
        (_ACCUMULATE.format(before=_TOTAL, loss=_SUM), "by the total number of samples"),
        (
            _ACCUMULATE.format(before=f"{_TOTAL}; dist.barrier()", loss=_RIGHT).replace(
                "dist.barrier()", "dist.all_reduce(torch.ones(3))"
            ),
            "One value per rank",
        ),
        (
            _ACCUMULATE.format(before=_TOTAL, loss=_RIGHT).replace(
                "nullcontext() if last else parallel.no_sync()", "nullcontext()"
            ),
            "inside no_sync",
        ),
        (
            # Each micro-batch separately, bypassing DDP, then reduced by hand.
            "def accumulate(parallel, micro_batches):\n"
            "    total = torch.tensor(sum(len(x) for x, _ in micro_batches))\n"
            "    dist.all_reduce(total)\n"
            "    for x, y in micro_batches:\n"
            "        (F.mse_loss(parallel.module(x), y, reduction='sum') / total).backward()\n"
            "    dist.all_reduce(parallel.module.weight.grad)",
            "DDP reduces them once",
        ),
        (
            "def accumulate(parallel, micro_batches):\n"
            "    total = torch.tensor(sum(len(x) for x, _ in micro_batches))\n"
            "    dist.all_reduce(total)\n"
            "    x, y = (torch.cat(part) for part in zip(*micro_batches))\n"
            f"    ({_RIGHT}).backward()",
            "Merged micro-batches",
        ),
        (
            "def accumulate(parallel, micro_batches):\n"
            "    total = torch.tensor(sum(len(x) for x, _ in micro_batches))\n"
            "    dist.all_reduce(total)\n"
            f"    sum({_RIGHT} for x, y in micro_batches).backward()",
            "a sum of losses keeps every graph",
        ),
        ("def accumulate(parallel, micro_batches):\n    pass", "Call backward() on the loss"),
    ],
    "11.3": [
        (
            # The fewest stages, which don't have the fewest layers.
            "def choose(layers, unit_bytes, budget_bytes):\n"
            "    for size in range(len(layers) + 1):\n"
            "        for c in combinations(range(len(layers)), size):\n"
            "            held = [1 if i in c else n for i, n in enumerate(layers)]\n"
            "            most = max(sum(held[:i]) + n for i, n in enumerate(layers))\n"
            "            if (most + 2) * unit_bytes <= budget_bytes:\n"
            "                return c",
            "computes less",
        ),
        ("def choose(layers, unit_bytes, budget_bytes):\n    return []", "Over the budget"),
        ("def choose(layers, unit_bytes, budget_bytes):\n    return None", "a choice that fits"),
        ("def choose(layers, unit_bytes, budget_bytes):\n    return [99]", "indices from 0"),
        (
            # What forward keeps, without what backward recomputes.
            "def choose(layers, unit_bytes, budget_bytes):\n"
            "    best = None\n"
            "    for size in range(len(layers) + 1):\n"
            "        for c in combinations(range(len(layers)), size):\n"
            "            held = sum(1 if i in c else n for i, n in enumerate(layers))\n"
            "            cost = sum(layers[i] for i in c)\n"
            "            fits = (held + 2) * unit_bytes <= budget_bytes\n"
            "            if fits and (best is None or cost < best[0]):\n"
            "                best = cost, c\n"
            "    return best[1] if best else None",
            "No choice fits",
        ),
    ],
    "11.4": [
        (_small(segments="1"), "Checkpoint segments of the tower, too"),
        (_small(parts="(x,)", factor="1"), "Split it into parts"),
        (_small(factor="1"), "divide each part's loss by k"),
        (_small(parts="x.chunk(4)[:3]"), "use every part"),
        (_small(segments="2"), "how many segments are best"),
        (_small(parts="x.chunk(64)", segments="1", factor="64"), "Small parts leave the GPU idle"),
        (
            "def small_step(tower, x):\n"
            "    losses = [\n"
            "        checkpoint_sequential(tower, 6, part, use_reentrant=False).square().mean() / 4\n"
            "        for part in x.chunk(4)\n"
            "    ]\n"
            "    sum(losses).backward()",
            "backward run before the next part's forward",
        ),
        (f"{_small()}\n    tower.zero_grad()", "don't call zero_grad"),
        (
            "def small_step(tower, x):\n"
            "    for part in x.chunk(4):\n"
            "        with torch.no_grad():\n"
            "            tower(part)\n"
            "        output = checkpoint_sequential(tower, 6, part, use_reentrant=False)\n"
            "        (output.square().mean() / 4).backward()",
            "at most twice",
        ),
    ],
}
