"""Typical mistakes in lesson 12's exercises, and what the learner must be told."""

from wrong_answers import template

_GRAD = "averaged_part(parameter.grad)"
_WRITE = "parameter.data.copy_(gathered(shard, parameter))"
_step = template(
    "def zero1_step(parameters, shards, optimizer):\n"
    "    for parameter, shard in zip(parameters, shards):\n"
    "        shard.grad = {grad}\n"
    "        {forget}\n"
    "    optimizer.step()\n"
    "    for parameter, shard in zip(parameters, shards):\n"
    "        {write}",
    grad=_GRAD,
    forget="parameter.grad = None",
    write=_WRITE,
)

_units = template(
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
    "    return {otherwise}",
    cuts="range(count)",
    most="[*gathered, *(a + b for a, b in pairwise(gathered))]",
    otherwise="None",
)

_ADAM = "torch.optim.Adam(model.parameters(), fused=True)"
_prepare = template(
    "def prepare(model, gpu):\n"
    "    {first}\n"
    "    for part in {parts}:\n"
    "        {how}\n"
    "    {then}\n"
    "    return {optimizer}",
    first="",
    parts="(model.embedding, *model.layers, model.head, model)",
    how="fully_shard(part)",
    then="model.to_empty(device=gpu)",
    optimizer=_ADAM,
)

_TOKENS = "def tokens_to_hide(gpus, flop_per_s, bytes_per_s):\n    return {}"

WRONG = {
    "12.1": [
        (
            _step(grad=f"{_GRAD} * dist.get_world_size()"),
            "times too large: you used the ranks' sum",
        ),
        (_step(write="pass"), "haven't changed"),
        (
            "def zero1_step(parameters, shards, optimizer):\n"
            "    optimizer.step()\n"
            "    for parameter, shard in zip(parameters, shards):\n"
            f"        shard.grad = {_GRAD}\n"
            f"        parameter.grad = None\n"
            f"        {_WRITE}",
            "once the shards have their gradients",
        ),
        (
            _step(write="parameter.data.view(-1)[:len(shard)] = shard.data[:parameter.numel()]"),
            "Get the other parts from an all-gather",
        ),
        (_step(grad="part_of(parameter.grad)"), "All ranks' gradients must be averaged"),
        (_step(forget="pass"), "set it to None"),
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
        (_prepare(parts="(model,)"), "single unit: forward gathers all of it at once"),
        (_prepare(parts="(*model.layers, model)"), "the embedding or the head"),
        (_prepare(parts="(model.embedding, *model.layers, model)"), "the embedding or the head"),
        (_prepare(parts="(*model.layers, model.head, model)"), "the embedding or the head"),
        (
            _prepare(parts="(model.embedding, *model.layers, model.norm, model.head)"),
            "a root stays gathered after forward",
        ),
        (
            _prepare(parts="(model.embedding, *model.layers, model.head)"),
            "then on the model for the remaining parameters",
        ),
        (
            _prepare(
                parts="[*(m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Linear))),"
                " model]"
            ),
            "The units are too small",
        ),
        (_prepare(first="model.to_empty(device=gpu)"), "still on the meta device"),
        (_prepare(then=""), "allocates this rank's slices"),
        (
            _prepare(first=f"optimizer = {_ADAM}", optimizer="optimizer"),
            "would train nothing, without an error",
        ),
        (_prepare(optimizer="model"), "return the optimizer"),
        (_prepare(parts="(model.embedding, model.layers, model.head, model)"), "ModuleList"),
        (
            _prepare(how="fully_shard(part, reshard_after_forward=False)"),
            "freed after forward",
        ),
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
            "The values differ from the checkpoint's",
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
    "12.5": [
        (_units(most="gathered"), "neighbors"),
        (_units(cuts="reversed(range(count))"), "with fewer gathers"),
        (_units(otherwise="[1] * count"), "too much"),
        ("def units(layer_bytes, budget_bytes):\n    return None", "make more units"),
        # Never a unit boundary after the first layer, or before the last.
        *(
            (_units().replace("range(1, count)", cut), "make more units")
            for cut in ("range(2, count)", "range(1, count - 1)")
        ),
        ("def units(layer_bytes, budget_bytes):\n    return [0]", "exactly one unit"),
    ],
}
