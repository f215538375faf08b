"""Typical mistakes in the exercises of lesson 09, and what the learner must be told."""

_BEST = "def best_split_size(time_of, batch_size):\n    return {}\n"

_LOSSES = "def all_losses(step, batches):\n    {}\n"

_ORDER = """
def order(stage, micro_batches):
    warm = {warm}
    row = [f"F{{i}}" for i in range(warm)]
    for i in range(micro_batches):
        {loop}
    return row
"""
_NEXT = 'row += [f"F{warm + i}"] * (warm + i < micro_batches)'


def _order(warm="min(3 - stage, micro_batches)", loop=f'{_NEXT} + [f"B{{i}}"]'):
    return _ORDER.format(warm=warm, loop=loop)


_REPAIRED = """
def repaired(batches, weight):
    default, side = torch.accelerator.current_stream(weight.device), torch.Stream(weight.device)
    buffers = [torch.empty_like(batches[0], device=weight.device) for _ in range(2)]
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
"""


def _repaired(first="pass", second="pass", third="pass", returned="products"):
    return _REPAIRED.format(first=first, second=second, third=third, returned=returned)


_ARRIVED, _READ = "default.wait_stream(side)", "side.wait_stream(default)"

WRONG = {
    "9.1": [
        (_BEST.format("12"), "It depends on the GPU"),
        (_BEST.format("batch_size"), "The best size here is smaller"),
        (_BEST.format("1"), "The best size here is larger"),
        (_BEST.format("min(range(1, batch_size + 1), key=time_of)"), "differ by a factor"),
        (_BEST.format("min(time_of(s) for s in (2, 4, 8, 16, 32))"), "not its time"),
        (_BEST.format("min((batch_size / 4, batch_size / 8), key=time_of)"), "whole number"),
    ],
    "9.2": [
        # All forward, then all backward.
        (_order(warm="micro_batches"), "Too many in flight"),
        # The same warm-up on every stage: the last one holds four as well.
        (_order(warm="min(3, micro_batches)"), "Too many in flight"),
        # One more than needed.
        (_order(warm="min(4 - stage, micro_batches)"), "Too many in flight"),
        # No warm-up at all: everything fits, and nothing overlaps.
        (_order(warm="0"), "the first ones can take more forwards"),
        # The warm-up grows with the stage, where it should shrink.
        (_order(warm="min(stage, micro_batches)"), "never ends"),
        # Backward before forward in the steady part: the last stage has nothing to go back with.
        (_order(loop=f'row.append(f"B{{i}}"); {_NEXT}'), "comes later in its own row"),
        # With one micro-batch, three forwards of warm-up.
        (_order(warm="3 - stage"), "These rows are no schedule"),
        # Without the backwards at the end.
        (
            _order(loop='row += [f"F{warm + i}", f"B{i}"] * (warm + i < micro_batches)'),
            "These rows are no schedule",
        ),
        # Numbers, not texts.
        ("def order(stage, micro_batches):\n    return [0, 1, 2]\n", "These rows are no schedule"),
    ],
    "9.3": [
        (_repaired(), "before its copy has arrived"),
        (_repaired(first=_ARRIVED), "may still read"),
        (_repaired(second=_READ), "before its copy has arrived"),
        (_repaired(second=_READ, third=_ARRIVED), "take turns"),
        (
            _repaired(
                first="torch.accelerator.synchronize(weight.device)",
                third="torch.accelerator.synchronize(weight.device)",
            ),
            "take turns",
        ),
        (
            "def repaired(batches, weight):\n"
            "    return [batch.to(weight.device) @ weight for batch in batches]\n",
            "take turns",
        ),
        (_repaired(first=_ARRIVED, second=_READ, returned="products[1:]"), "One product for each"),
    ],
    "9.4": [
        (_LOSSES.format("return [step(batch).item() for batch in batches]"), "no .item() in"),
        (
            _LOSSES.format("losses = list(map(step, batches)); return [x.item() for x in losses]"),
            "make one tensor",
        ),
        (_LOSSES.format("return [step(batch) for batch in batches]"), "Ask for the numbers once"),
        (_LOSSES.format("return sum(map(step, batches)).item()"), "Python numbers"),
        (_LOSSES.format("return torch.stack([step(b) for b in batches[1:]]).tolist()"), "a list"),
    ],
}
