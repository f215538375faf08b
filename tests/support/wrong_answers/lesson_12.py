"""Typical mistakes in the exercises of lesson 12, and what the learner must be told."""

_STEP = (
    "def zero1_step(parameters, shards, optimizer):\n"
    "    for parameter, shard in zip(parameters, shards):\n"
    "        shard.grad = {grad}\n"
    "        {forget}\n"
    "    optimizer.step()\n"
    "    for parameter, shard in zip(parameters, shards):\n"
    "        {write}"
)
_GRAD = "averaged_part(parameter.grad)"
_FORGET = "parameter.grad = None"
_WRITE = "parameter.data.copy_(gathered(shard, parameter))"

_UNITS = (
    "def units(layer_bytes, budget_bytes):\n"
    "    from itertools import combinations, pairwise\n"
    "    count = len(layer_bytes)\n"
    "    for cuts in {cuts}:\n"
    "        for places in combinations(range(1, count), cuts):\n"
    "            ends = list(pairwise([0, *places, count]))\n"
    "            gathered = [sum(layer_bytes[a:b]) for a, b in ends]\n"
    "            most = max({most})\n"
    "            if most <= budget_bytes:\n"
    "                return [b - a for a, b in ends]\n"
    "    return {otherwise}"
)
_NEIGHBORS = "[*gathered, *(a + b for a, b in pairwise(gathered))]"

_TOKENS = "def tokens_to_hide(gpus, flop_per_s, bytes_per_s):\n    return {}"

WRONG = {
    "12.1": [
        (
            _STEP.format(grad=f"{_GRAD} * dist.get_world_size()", forget=_FORGET, write=_WRITE),
            "times too large: a sum",
        ),
        (_STEP.format(grad=_GRAD, forget=_FORGET, write="pass"), "haven't changed"),
        (
            "def zero1_step(parameters, shards, optimizer):\n"
            "    optimizer.step()\n"
            "    for parameter, shard in zip(parameters, shards):\n"
            f"        shard.grad = {_GRAD}\n"
            f"        {_FORGET}\n"
            f"        {_WRITE}",
            "once the shards have their gradients",
        ),
        (
            _STEP.format(
                grad=_GRAD,
                forget=_FORGET,
                write="parameter.data.view(-1)[:len(shard)] = shard.data[:parameter.numel()]",
            ),
            "from an all-gather",
        ),
        (
            _STEP.format(grad="part_of(parameter.grad)", forget=_FORGET, write=_WRITE),
            "All ranks' gradients must be averaged",
        ),
        (_STEP.format(grad=_GRAD, forget="pass", write=_WRITE), "set it to None"),
        (
            "def zero1_step(parameters, shards, optimizer):\n"
            "    for parameter, shard in zip(parameters, shards):\n"
            "        dist.all_reduce(parameter.grad)\n"
            "        shard.grad = part_of(parameter.grad) / dist.get_world_size()\n"
            "        parameter.grad = None\n"
            "    optimizer.step()\n"
            "    for parameter, shard in zip(parameters, shards):\n"
            f"        {_WRITE}",
            "An all-reduce does both halves",
        ),
    ],
    "12.2": [
        (
            _UNITS.format(cuts="range(count)", most="gathered", otherwise="None"),
            "neighbors",
        ),
        (
            _UNITS.format(cuts="reversed(range(count))", most=_NEIGHBORS, otherwise="None"),
            "with fewer gathers",
        ),
        (
            _UNITS.format(cuts="range(count)", most=_NEIGHBORS, otherwise="[1] * count"),
            "too much",
        ),
        ("def units(layer_bytes, budget_bytes):\n    return None", "make more units"),
        # Never a unit boundary after the first layer, or before the last.
        *(
            (
                _UNITS.format(cuts="range(count)", most=_NEIGHBORS, otherwise="None").replace(
                    "range(1, count)", cut
                ),
                "make more units",
            )
            for cut in ("range(2, count)", "range(1, count - 1)")
        ),
        ("def units(layer_bytes, budget_bytes):\n    return [0]", "exactly one unit"),
    ],
    "12.3": [
        (
            _TOKENS.format("2 * (gpus - 1) / gpus * flop_per_s / bytes_per_s"),
            "Twice as many as needed",
        ),
        (
            _TOKENS.format("(gpus - 1) / gpus * flop_per_s / bytes_per_s / 2"),
            "Half the right number",
        ),
        (_TOKENS.format("flop_per_s / bytes_per_s"), "already has its own part"),
        (_TOKENS.format("(gpus - 1) / gpus * flop_per_s / bytes_per_s / 3"), "Forward alone"),
        (_TOKENS.format("bytes_per_s / flop_per_s"), "times the right number"),
        (_TOKENS.format("'1202'"), "one number"),
    ],
    "12.4": [
        (
            "def fill(model, folder):\n"
            "    state = {'model': {k: v.clone() for k, v in get_model_state_dict(model).items()}}\n"
            "    dcp.load(state, checkpoint_id=folder)",
            "Are they the model's own?",
        ),
        ("def fill(model, folder):\n    pass", "The model hasn't changed"),
        (
            "def fill(model, folder):\n"
            "    state = {'model': get_model_state_dict(model)}\n"
            "    dcp.load(state, checkpoint_id=folder)\n"
            "    for value in state['model'].values():\n"
            "        value.full_tensor()",
            "gather the whole model",
        ),
        (
            "def fill(model, folder):\n"
            "    state = {'model': get_model_state_dict(model)}\n"
            "    dcp.load(state, checkpoint_id=folder)\n"
            "    for parameter in model.parameters():\n"
            "        parameter.data.mul_(2)",
            "The values aren't the checkpoint's",
        ),
        (
            "def fill(model, folder):\n"
            "    dcp.load(get_model_state_dict(model), checkpoint_id=folder)",
            "Missing key in checkpoint",
        ),
        (
            "def fill(model, folder):\n    model.load_state_dict(torch.load(folder))",
            "IsADirectoryError",
        ),
    ],
}
