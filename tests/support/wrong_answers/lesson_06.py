"""Typical mistakes in the exercises of lesson 06, and what the learner must be told."""

import re

from wrong_answers import template

_LENGTH = "len(tensor) // dist.get_world_size()"
_sum = template(
    """
def sum_over_ranks(tensor):
    part = {part}
    dist.reduce_scatter_single(part, tensor)
    total = {total}
    dist.all_gather_single(total, part)
    return {result}
""",
    part=f"tensor.new_empty({_LENGTH})",
    total="torch.empty_like(tensor)",
    result="total",
)


_mean = template(
    """
def mean_over_ranks(values):
    {before}
    total = {total}
    dist.all_reduce(total)
    return {result}
""",
    before="",
    total="torch.stack([values.sum(), values.new_tensor(len(values))])",
    result="total[0] / total[1]",
)


AVERAGED = """
def stop_together(rank, world_size, losses, limit):
    averages = []
    for loss in losses[rank]:
        total = torch.tensor(loss, device=my_gpu())
        dist.all_reduce(total)
        average = total.item() / world_size
        {rest}
    return averages
"""
ON_THE_CPU = AVERAGED.replace(", device=my_gpu()", "").format(
    rest="if average < limit: break\n        averages.append(average)"
)
STOPS_ALONE = """
def stop_together(rank, world_size, losses, limit):
    averages = []
    for loss in losses[rank]:
        if loss < limit:
            break
        total = torch.tensor(loss, device=my_gpu())
        dist.all_reduce(total)
        averages.append(total.item() / world_size)
    dist.barrier()
    return averages
"""
STOPS_WITH_THE_FIRST = """
def stop_together(rank, world_size, losses, limit):
    averages = []
    for step, loss in enumerate(losses[rank]):
        if min(other[step] for other in losses) < limit:
            break
        total = torch.tensor(loss, device=my_gpu())
        dist.all_reduce(total)
        averages.append(total.item() / world_size)
    return averages
"""

_RING = """
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        incoming = chunks[(rank - step - 1) % world_size]
        received = torch.zeros_like(incoming)
        exchange(chunks[(rank - step) % world_size], received)
        if step < world_size - 1:
            incoming += received
        else:
            {last}
    return tensor
"""

WRONG = {
    "6.1": [
        (
            "def sum_over_ranks(tensor):\n    dist.all_reduce(tensor)\n    return tensor",
            "without all_reduce",
        ),
        (
            """
def sum_over_ranks(tensor):
    part = tensor.new_empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_single(part, tensor)
    return part
""",
            "Collect the other ranks' parts",
        ),
        (
            """
def sum_over_ranks(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return sum(everything)
""",
            "over budget",
        ),
        (
            """
def sum_over_ranks(tensor):
    parts = torch.empty_like(tensor)
    dist.all_to_all_single(parts, tensor)
    total = torch.empty_like(tensor)
    dist.all_gather_single(total, parts.view(dist.get_world_size(), -1).sum(0))
    return total
""",
            "one call does both",
        ),
        (
            _sum(
                part=f"torch.empty({_LENGTH}, device=tensor.device)",
                total="torch.empty(len(tensor), device=tensor.device)",
            ),
            "the same type as input tensor",
        ),
        (_sum(result="tensor"), "rank's own tensor"),
        (
            """
def sum_over_ranks(tensor):
    part = tensor.new_empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_single(part, tensor)
    if dist.get_rank() == 0:
        total = torch.empty_like(tensor)
        dist.all_gather_single(total, part)
        return total
""",
            "rank 0 is waiting in all_gather_single",
        ),
        (
            _sum(part=f"torch.empty({_LENGTH}, dtype=tensor.dtype)"),  # left on the CPU
            "reduce_scatter was given a CPU tensor, and NCCL sends only tensors on the rank's GPU",
        ),
        (
            _sum(result="total.cpu()"),
            re.compile(
                r"the answer is on the cpu, but the tensor was on vgpu:[0-3]: create it there, with"
            ),
        ),
        ("def sum_over_ranks(tensor):\n    return tensor / 0 + missing", "line 2 of your cell"),
        ("def sum_over_ranks(tensor):\n    import os\n    os._exit(3)", "exited with code 3"),
        ("sum_over_ranks = torch.ones(3)", "Pass the function itself"),
    ],
    "6.2": [
        (
            _mean(total="values.mean()", result="total / dist.get_world_size()"),
            "counts a short shard as much",
        ),
        (_mean(before="if len(values) == 0: return 0.0"), "never arrived"),
        (
            _mean(result="total[0] / total[1] if dist.get_rank() == 0 else None").replace(
                "all_reduce(total", "reduce(total, dst=0"
            ),
            "Every rank needs the mean",
        ),
        (
            """
def mean_over_ranks(values):
    total = values.sum()
    count = torch.tensor(len(values), device=values.device)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count
""",
            "into one tensor",
        ),
        (
            _mean(total="torch.tensor([values.sum(), len(values)])"),
            "all_reduce was given a CPU tensor",
        ),
        (
            _mean(total="torch.stack([values.sum(), torch.tensor(float(len(values)))])"),
            "where the odd one comes from",
        ),
        ("def mean_over_ranks(values):\n    return values.mean()", "the ranks have to communicate"),
        (_mean(result="values.mean()"), "although the ranks communicated"),
        (
            _mean(total="values.sum()", result="total / dist.get_world_size()"),
            "not by the number of ranks",
        ),
        (_mean(total="values.sum()", result="total"), "This is the sum of all values"),
    ],
    "6.3": [
        ("never_came = '2'", "an int, counted from 0"),
        ("never_came = 0", "says which rank never arrived"),
    ],
    "6.4": [
        (
            AVERAGED.format(rest="averages.append(average)").replace(
                "return averages", "return [a for a in averages if a >= limit]"
            ),
            "leave the loop",
        ),
        (ON_THE_CPU, "all_reduce was given a CPU tensor"),
        (STOPS_ALONE, "is waiting in all_reduce, <exercise 6.4>"),
        (STOPS_WITH_THE_FIRST, "stops too early"),
        (AVERAGED.format(rest="averages.append(average)"), "never stops early"),
        (
            AVERAGED.format(
                rest="if average < limit: break\n        averages.append(average)"
            ).replace(" / world_size", ""),
            "divide by the number of ranks",
        ),
        (
            # The right length in the first case, where no rank stops early.
            AVERAGED.format(rest="if average < limit: break\n        averages.insert(0, average)"),
            "before the first one that's below the limit",
        ),
        (
            AVERAGED.format(rest="averages.append(average)\n        if average < limit: break"),
            "and isn't returned",
        ),
        (
            AVERAGED.format(
                rest="dist.barrier()\n        if average < limit: break\n"
                "        averages.append(average)"
            ),
            "One all_reduce already",
        ),
        (
            """
def stop_together(rank, world_size, losses, limit):
    averages = [sum(step) / world_size for step in zip(*losses)]
    return [a for step, a in enumerate(averages) if min(averages[: step + 1]) >= limit]
""",
            "doesn't know the other ranks' losses",
        ),
        (
            AVERAGED.format(rest="if average <= limit: break\n        averages.append(average)"),
            "equals the limit",
        ),
        (
            AVERAGED.format(
                rest="if average < limit: return averages\n        averages.append(average)"
            ).removesuffix("    return averages\n"),
            "all of them if none is",
        ),
        (
            """
def stop_together(rank, world_size, losses, limit):
    averages, step, average = [], 0, limit
    while average >= limit:
        total = torch.tensor(losses[rank][step], device=my_gpu())
        dist.all_reduce(total)
        average, step = total.item() / world_size, step + 1
        averages.append(average)
    return averages[:-1]
""",
            "IndexError",
        ),
        ("stop_together = 3", "without calling it"),
    ],
    "6.5": [
        (
            "def ring_all_reduce(tensor):\n    dist.all_reduce(tensor)\n    return tensor",
            "only exchange to build",
        ),
        ("def ring_all_reduce(tensor):\n    return tensor", "own tensor"),
        (_RING.format(last="break"), "Go around the ring once more"),
        (_RING.format(last="incoming += received"), "added more than once"),
        (
            _RING.format(last="incoming.copy_(received)").replace(
                "(rank - step) %", "(rank + step) %"
            ),
            "In step s",
        ),
        (
            # Whole tensors travel around the ring.
            """
def ring_all_reduce(tensor):
    total, moving = tensor.clone(), tensor
    for _ in range(dist.get_world_size() - 1):
        received = torch.empty_like(moving)
        exchange(moving, received)
        total, moving = total + received, received
    return total
""",
            "one chunk in each step",
        ),
    ],
}
