"""Typical mistakes in the exercises for lesson 18, and what the learner must be told."""

from wrong_answers import template

_cache = template(
    """
def remember(cache, key, value):
    if {before}:
        key, value = {joined}
    cache.update({kept})
    return {returned}
""",
    before="cache",
    joined='torch.cat([cache["key"], key], 2), torch.cat([cache["value"], value], 2)',
    kept="key=key, value=value",
    returned="key, value",
)

_draw = template(
    """
def draw(logits, noise):
    value, index = (logits + noise).max(-1)
    index = index + {offset}
    ranks = dist.get_world_size()
    values = [torch.empty_like(value) for _ in range(ranks)]
    indices = [torch.empty_like(index) for _ in range(ranks)]
    dist.all_gather(values, value)
    dist.all_gather(indices, index)
    {choice}
""",
    offset="dist.get_rank() * logits.size(-1)",
    choice="return torch.stack(indices).gather(0, torch.stack(values).argmax(0)[None])[0]",
)

_ROOM = "room_bytes = min(limit_s * bytes_per_s, memory_bytes) - weight_bytes"
_batch = template(
    """
def largest_batch(limit_s, context, weight_bytes, cache_bytes, memory_bytes, bytes_per_s):
    {room}
    return {result}
""",
    room=_ROOM,
    result="max(0, int(room_bytes // (cache_bytes * context)))",
)

_fair = template(
    """
def fair(generations, budget):
    tokens = [0 if g.prompt_left else 1 for g in generations]
    left = {left}
    prompts = [place for place, g in enumerate(generations) if g.prompt_left]
    prompts.sort(key=lambda place: {key})
    for done, place in enumerate(prompts):
        share = {share}
        tokens[place] = min(generations[place].prompt_left, share)
        left -= tokens[place]
    return tokens
""",
    left="budget - sum(tokens)",
    key="generations[place].prompt_left",
    share="max(0, left) // (len(prompts) - done)",
)

_bytes = template(
    """
def bytes_on_gpu(sizes, sequences, tokens, bits, tp):
    heads = {heads}
    return {numbers} * heads * sizes.head_width * sequences * tokens * {bits}
""",
    heads="-(-sizes.key_value_heads // tp)",
    numbers="2 * sizes.layers",
    bits="bits // 8",
)

WRONG = {
    "18.1": [
        (_cache(before="False"), "only the new ones"),
        (_cache(kept=""), "The next pass needs them all"),
        (_cache(kept="key=key"), "The next pass needs them all"),
        (
            _cache(
                joined='torch.cat([cache["key"], key], 1), torch.cat([cache["value"], value], 1)'
            ).replace("if cache", "if cache and key.size(2) == cache['key'].size(2)"),
            "only the new ones",
        ),
        (
            _cache(
                joined='torch.cat([key, cache["key"]], 2), torch.cat([value, cache["value"]], 2)'
            ),
            "New ones come last",
        ),
        (_cache(returned="value, key"), "swapped"),
        (
            _cache(joined='torch.cat([cache["key"], key]), torch.cat([cache["value"], value])'),
            "Tokens are dimension 2",
        ),
        (_cache(returned="key"), "Return two tensors"),
        (_cache(returned="key.transpose(1, 2), value"), "Tokens are dimension 2"),
        (
            """
seen = {}
def remember(cache, key, value):
    if seen:
        key, value = torch.cat([seen["key"], key], 2), torch.cat([seen["value"], value], 2)
    seen.update(key=key, value=value)
    cache.update(seen)
    return key, value
""",
            "All tokens of this layer",
        ),
    ],
    "18.2": [
        (_batch(room="room_bytes = limit_s * bytes_per_s - weight_bytes"), "don't fit in memory"),
        (_batch(room="room_bytes = memory_bytes - weight_bytes"), "takes longer than the limit"),
        (_batch(result="int(room_bytes // (cache_bytes * context))"), "the answer is 0"),
        (_batch(result="max(0, round(room_bytes / (cache_bytes * context) + 0.5))"), "Round down"),
        (_batch(room=_ROOM.replace(" - weight_bytes", "")), "the weights once"),
    ],
    "18.3": [
        (_draw(offset="0"), "counts from its rank's own first token"),
        (_draw(choice="return index"), "which rank has the best"),
        (_draw(choice="return torch.stack(values).amax(0)"), "as int64"),
        (_draw(choice="return torch.stack(indices)"), "one number for each sequence"),
        (
            """
def draw(logits, noise):
    scores = logits + noise
    parts = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, scores)
    return torch.cat(parts, -1).argmax(-1)
""",
            "over budget",
        ),
        (_draw().replace("(logits + noise)", "noise"), "the largest of logits + noise"),
    ],
    "18.4": [
        (_bytes(numbers="sizes.layers"), "Keys and values"),
        (_bytes(heads="sizes.key_value_heads"), "all GPUs together"),
        (_bytes(heads="max(1, sizes.heads // tp)"), "fewer of them than query heads"),
        (_bytes(heads="sizes.key_value_heads", bits="bits // 8 // tp"), "whole heads"),
        (_bytes(heads="(sizes.key_value_heads // tp)"), "whole heads"),
        (_bytes(bits="bits / 8"), "make it an integer"),
        (_bytes(bits="bits"), "bits / 8 bytes"),
        (_bytes(bits="2"), "not always 16"),
        (_bytes(numbers="2"), "Every layer"),
        (_bytes(bits="(bits // 8)"), "multiply everything first"),
        (
            "def bytes_on_gpu(sizes, sequences, tokens, bits, tp):\n    return None",
            "a number of bytes",
        ),
    ],
    "18.5": [
        (_fair(key="place", share="max(0, left)"), "an equal share"),
        (_fair(share="max(0, left)"), "an equal share"),
        (_fair(left="budget"), "Generations that are decoding count, too"),
        (_fair(share="budget // 64"), "an equal share, unless it needs less"),
        # One token for each prompt, and the rest to the shortest; or in order of arrival.
        (_fair(share="max(1, left - (len(prompts) - done - 1))"), "others overtake it"),
        (
            _fair(share="max(1, left - (len(prompts) - done - 1))", key="place"),
            "others overtake it",
        ),
        (
            _fair(
                share="max(0, budget - sum(g.prompt_left == 0 for g in generations)) // len(prompts)"
            ),
            "leaves the rest",
        ),
        (
            "def fair(generations, budget):\n"
            "    return [budget // len(generations) for g in generations]",
            "no more than it has left",
        ),
        (_fair().replace("else 1 for", "else 0 for"), "they come first"),
        (
            """
def fair(generations, budget):
    tokens = [0 if g.prompt_left else 1 for g in generations]
    while hungry := [i for i, g in enumerate(generations) if tokens[i] < g.prompt_left]:
        share = (budget - sum(tokens)) // len(hungry)
        if share <= 0:
            break
        for i in hungry:
            tokens[i] += min(share, generations[i].prompt_left - tokens[i])
    return tokens
""",
            "an equal share rounds down to 0",
        ),
        ("def fair(generations, budget):\n    return 1", "a list with an integer"),
    ],
}
