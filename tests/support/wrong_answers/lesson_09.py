"""Typical mistakes in lesson 09's exercises, and the message that each must get."""

from wrong_answers import template

_pipelined = template(
    """
def pipelined(stages, gpus, split_size, batch):
    outputs = []
    for hidden in {pieces}:
        for stage, gpu in zip(stages, gpus):
            {step}
        outputs.append(hidden)
    return {returned}
""",
    pieces="batch.split(split_size)",
    step="hidden = stage(hidden.to(gpu))",
    returned="torch.cat(outputs)",
)


_BEST = "def best_split_size(time_of, batch_size):\n    return {}\n"

_repaired = template(
    """
def repaired(batches, weight):
    default, side = torch.accelerator.current_stream(weight.device), torch.Stream(weight.device)
    buffers = [torch.empty_like(batches[0], device=weight.device) for _ in range(2)]
    side.wait_stream(default)
    with side:
        buffers[0].copy_(batches[0], non_blocking=True)
    products = []
    for index in range(len(batches)):
        {first}
        if index + 1 < len(batches):
            {second}
            with side:
                buffers[(index + 1) % 2].copy_(batches[index + 1], non_blocking=True)
        {third}
        products.append(buffers[index % 2] @ weight)
    return {returned}
""",
    first="pass",
    second="pass",
    third="pass",
    returned="products",
)


# A new tensor for each batch, which is freed while its matmul may still be reading it.
_NOT_RECORDED = """
def repaired(batches, weight):
    default, side = torch.accelerator.current_stream(weight.device), torch.Stream(weight.device)
    products = []
    for batch in batches:
        with side:
            arrived = batch.to(weight.device, non_blocking=True)
        default.wait_stream(side)
        products.append(arrived @ weight)
    return products
"""

_ARRIVED, _READ = "default.wait_stream(side)", "side.wait_stream(default)"

WRONG = {
    "9.1": [
        (_pipelined(pieces="[batch]"), "Every stage sees every piece once"),
        (_pipelined(step="hidden = stage(hidden)"), "same device"),
        (_pipelined(returned="outputs"), "torch.cat(outputs)"),
        (_pipelined(returned="torch.cat(outputs[::-1])"), "in the batch's order"),
        (_pipelined(returned="torch.cat(outputs).to(gpus[0])"), "stay on the last GPU"),
        (_pipelined(returned="torch.cat(outputs).detach()"), "cut the graph"),
        (_pipelined(step="hidden = stage(hidden.detach().to(gpu))"), "cuts the graph"),
        (
            _pipelined(step="hidden = stage(hidden.to(gpu)); hidden.sum().item()"),
            "don't read any value there",
        ),
        (
            # All pieces through one stage, then all through the next.
            "def pipelined(stages, gpus, split_size, batch):\n"
            "    pieces = batch.split(split_size)\n"
            "    for stage, gpu in zip(stages, gpus):\n"
            "        pieces = [stage(piece.to(gpu)) for piece in pieces]\n"
            "    return torch.cat(pieces)\n",
            "Take each piece through all stages",
        ),
    ],
    "9.2": [
        (_BEST.format("12"), "The best size depends on the GPU"),
        (_BEST.format("batch_size"), "including very small"),
        (_BEST.format("1"), "and the whole batch"),
        (_BEST.format("min(range(1, batch_size + 1), key=time_of)"), "differ by a factor of 2"),
        (_BEST.format("min(time_of(s) for s in (2, 4, 8, 16, 32))"), "not its time"),
        (_BEST.format("batch_size / 2"), "an integer from"),
    ],
    "9.3": [
        (_repaired(), "before its copy has arrived"),
        (_repaired(first=_ARRIVED), "may still be reading"),
        (_repaired(second=_READ, third=_ARRIVED), "take turns"),
        (_NOT_RECORDED, "or call record_stream"),
        (
            _repaired(first=_ARRIVED, second=_READ).replace(f"    {_READ}\n", "", 1),
            "may still be reading the buffers' memory",
        ),
        (_repaired(first=_ARRIVED, second=_READ, returned="products[1:]"), "one product for each"),
    ],
}
