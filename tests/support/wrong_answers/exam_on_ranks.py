"""Typical mistakes in the exam's tasks that run on ranks."""

from wrong_answers import template

_largest = template(
    """
def largest(scores, k):
    mine = scores.new_full(({room},), {stand_in})
    best = scores.topk(min({room}, len(scores))).values
    mine[: len(best)] = best
    everyone = mine.new_empty({room} * dist.get_world_size())
    dist.all_gather_single(everyone, mine)
    return {result}
""",
    room="k",
    stand_in="-torch.inf",
    result="everyone.topk(k).values",
)

_NORM = """total = sum(g.square().sum() for g in sharded)
    dist.all_reduce(total)
    norm = (total + sum(g.square().sum() for g in replicated)).sqrt()"""
_clip = template(
    """
def clip(sharded, replicated, max_norm):
    {norm}
    scale = {scale}
    for gradient in {scaled}:
        gradient.mul_(scale)
    return norm
""",
    norm=_NORM,
    scale="(max_norm / norm).clamp(max=1)",
    scaled="(*sharded, *replicated)",
)

_likeliest = template(
    """
def likeliest(logits):
    value, word = logits.max(-1)
    {shift}
    mine = torch.stack([{value}, {word}])
    everyone = mine.new_empty(dist.get_world_size(), *mine.shape)
    dist.all_gather_single(everyone, mine)
    winner = everyone[:, 0].argmax(0, keepdim=True)
    return everyone[:, 1].gather(0, winner)[0].long()
""",
    shift="word += dist.get_rank() * logits.shape[-1]",
    value="value.double()",
    word="word.double()",
)

WRONG = {
    "99.5": [
        (_largest(stand_in="0"), "must lose"),
        (_largest(result="everyone.topk(k).values.flip(0)"), "descending"),
        (_largest(room="20"), "but over budget"),
        (_largest(result="everyone.topk(k).values.cpu()"), "on the device of the rank's tensor"),
        (
            "def largest(scores, k):\n"
            "    slots = scores.new_full((dist.get_world_size(), k), -torch.inf)\n"
            "    best = scores.topk(min(k, len(scores))).values\n"
            "    slots[dist.get_rank(), : len(best)] = best\n"
            "    dist.all_reduce(slots, dist.ReduceOp.MAX)\n"
            "    return slots.flatten().topk(k).values",
            "but over budget",
        ),
        ("def largest(scores, k):\n    return scores.topk(k).values", "out of range"),
    ],
    "99.9": [
        (
            _clip(
                norm="total = sum(g.square().sum() for g in (*sharded, *replicated))\n"
                "    dist.all_reduce(total)\n    norm = total.sqrt()"
            ),
            "count them once",
        ),
        (
            _clip(norm="norm = torch.nn.utils.get_total_norm([*sharded, *replicated])"),
            "what one rank has",
        ),
        (_clip(scale="max_norm / norm"), "never make it larger"),
        (_clip(scaled="sharded"), "Scale every gradient"),
        (
            _clip(
                norm="total = sum(g.square().sum() for g in sharded).sqrt()\n"
                "    dist.all_reduce(total)\n"
                "    norm = total + sum(g.square().sum() for g in replicated).sqrt()"
            ),
            "their squares do",
        ),
    ],
    "99.10": [
        (_likeliest(shift=""), "right within each rank's part"),
        (_likeliest(value="value", word="word.bfloat16()"), "too few for a word"),
        (_likeliest(value="value.half()", word="word.half()"), "too few for a"),
        (_likeliest().replace(".long()", ""), "Return them as integers"),
        (
            "def likeliest(logits):\n"
            "    rows, words = logits.shape\n"
            "    everyone = logits.new_empty(dist.get_world_size(), rows, words)\n"
            "    dist.all_gather_single(everyone, logits)\n"
            "    return everyone.transpose(0, 1).reshape(rows, -1).argmax(-1)",
            "but over budget",
        ),
    ],
}
