"""Typical mistakes in lesson 10's exercises, and the message that each must get."""

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


_CUT = "def layers_per_stage(layer_times, devices):\n    count = len(layer_times)\n    {}\n"

WRONG = {
    "10.1": [
        # All forward, then all backward.
        (_order(warm="micro_batches"), "Too many micro-batches in flight"),
        # No warm-up at all: everything fits, but nothing overlaps.
        (_order(warm="0"), "the first stages can run more forwards"),
        # The warm-up grows with the stage, although it should shrink.
        (_order(warm="min(stage, micro_batches)"), "never ends"),
        # Backward before forward in the steady state: the last stage has nothing to run backward.
        (_order(loop=f'row.append(f"B{{i}}"); {_NEXT}'), "comes later in its own row"),
        # Three warm-up forwards, even with one micro-batch.
        (_order(warm="3 - stage"), "These rows aren't a schedule"),
    ],
    "10.2": [
        # The same number of layers in each stage.
        (
            _CUT.format(
                "each = count // devices; return [each] * (devices - 1) + "
                "[count - each * (devices - 1)]"
            ),
            "the pace of the longest",
        ),
        # The remainder as one more stage.
        (_CUT.format("return [count // devices] * devices + [count % devices]"), "add up to"),
        (_CUT.format("return [0] * (devices - 1) + [count]"), "integers of at least 1"),
        (_CUT.format("return [sum(layer_times) / devices] * devices"), "how many layers"),
    ],
    "10.3": [
        (_LOSSES.format("return [step(batch).item() for batch in batches]"), "no .item() in"),
        (
            _LOSSES.format("losses = list(map(step, batches)); return [x.item() for x in losses]"),
            "into one tensor",
        ),
        (_LOSSES.format("return [step(batch) for batch in batches]"), "Read the values once"),
        (_LOSSES.format("return sum(map(step, batches)).item()"), "Python floats"),
        (_LOSSES.format("return torch.stack([step(b) for b in batches[1:]]).tolist()"), "a list"),
    ],
}
