"""Typical mistakes in the exercises of lesson 06, and what the learner must be told."""

AVERAGED = """
def repaired(rank, world_size, losses, limit):
    averages = []
    for loss in losses[rank]:
        total = torch.tensor(loss)
        dist.all_reduce(total)
        average = total.item() / world_size
        {rest}
    return averages
"""
STOPS_ALONE = """
def repaired(rank, world_size, losses, limit):
    averages = []
    for loss in losses[rank]:
        if loss < limit:
            break
        total = torch.tensor(loss)
        dist.all_reduce(total)
        averages.append(total.item() / world_size)
    dist.barrier()
    return averages
"""
STOPS_WITH_THE_FIRST = """
never_came = 2

def repaired(rank, world_size, losses, limit):
    averages = []
    for step, loss in enumerate(losses[rank]):
        if min(other[step] for other in losses) < limit:
            break
        total = torch.tensor(loss)
        dist.all_reduce(total)
        averages.append(total.item() / world_size)
    return averages
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
    dist.reduce_scatter_tensor(part, tensor)
    return part
""",
            "Collect the parts",
        ),
        (
            """
def sum_over_ranks(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return sum(everything)
""",
            "more than the budget",
        ),
        (
            """
def sum_over_ranks(tensor):
    part = torch.empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, tensor)
    total = torch.empty(len(tensor))
    dist.all_gather_into_tensor(total, part)
    return total
""",
            "dtype",
        ),
        (
            """
def sum_over_ranks(tensor):
    part = tensor.new_empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, tensor)
    dist.all_gather_into_tensor(torch.empty_like(tensor), part)
    return tensor
""",
            "rank's own tensor",
        ),
        (
            """
def sum_over_ranks(tensor):
    part = tensor.new_empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, tensor)
    if dist.get_rank() == 0:
        total = torch.empty_like(tensor)
        dist.all_gather_into_tensor(total, part)
        return total
""",
            "rank 0 waits in all_gather_into_tensor",
        ),
        (
            """
from torch.distributed import all_reduce

def sum_over_ranks(tensor):
    all_reduce(tensor)
    return tensor
""",
            "without all_reduce",
        ),
        ("def sum_over_ranks(tensor):\n    return tensor / 0 + missing", "line 2 of your cell"),
        ("def sum_over_ranks(tensor):\n    import os\n    os._exit(3)", "exit code 3"),
        ("sum_over_ranks = torch.ones(3)", "Hand over the function itself"),
    ],
    "6.2": [
        (
            """
def mean_over_ranks(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
""",
            "counts a short shard as much",
        ),
        (
            """
def mean_over_ranks(values):
    if len(values) == 0:
        return 0.0
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]
""",
            "never came",
        ),
        (
            """
def mean_over_ranks(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.reduce(total, dst=0)
    return total[0] / total[1] if dist.get_rank() == 0 else None
""",
            "Every rank needs the mean",
        ),
        (
            """
def mean_over_ranks(values):
    total = values.sum()
    count = torch.tensor(len(values))
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count
""",
            "into one tensor",
        ),
        (
            "def mean_over_ranks(values):\n    return values.mean()",
            "the ranks have to talk",
        ),
        (
            """
def mean_over_ranks(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / dist.get_world_size()
""",
            "not by the number of ranks",
        ),
        (
            """
def mean_over_ranks(values):
    total = values.sum()
    dist.all_reduce(total)
    return total
""",
            "This is the sum of all values",
        ),
    ],
    "6.3": [
        (
            "never_came = 2\n"
            + AVERAGED.format(rest="averages.append(average)").replace(
                "return averages", "return [a for a in averages if a >= limit]"
            ),
            "leave the loop",
        ),
        ("never_came = '2'\ndef repaired(*_): pass", "whole number from 0"),
        (
            "never_came = 0\n"
            + AVERAGED.format(rest="if average < limit: break\n        averages.append(average)"),
            "Run train_until itself",
        ),
        ("never_came = 2\n" + STOPS_ALONE, "waits in all_reduce, <exercise 6.3>"),
        (STOPS_WITH_THE_FIRST, "stops too early"),
        (
            "never_came = 2\n" + AVERAGED.format(rest="averages.append(average)"),
            "never stops early",
        ),
        (
            "never_came = 2\n"
            + AVERAGED.format(rest="averages.append(average)\n        if average < limit: break"),
            "before it is noted",
        ),
        (
            "never_came = 2\n"
            + AVERAGED.format(
                rest="dist.barrier()\n        if average < limit: break\n"
                "        averages.append(average)"
            ),
            "One all_reduce already",
        ),
        (
            """
never_came = 2

def repaired(rank, world_size, losses, limit):
    averages = [sum(step) / world_size for step in zip(*losses)]
    return [a for step, a in enumerate(averages) if min(averages[: step + 1]) >= limit]
""",
            "does not know the losses of the others",
        ),
        ("never_came = 2\nrepaired = 3", "without calling repaired"),
    ],
}
