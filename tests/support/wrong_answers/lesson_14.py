"""Typical mistakes in lesson 14's exercises, and what the learner must be told."""

from wrong_answers import template

_groups = template(
    """
def groups_of(sizes, dimension):
    ranks = torch.arange(math.prod(sizes)).view({shape})
    return {result}
""",
    shape="sizes",
)


def _mesh(sizes, names):
    return f"""
def mesh_for(hosts, gpus_per_host, tensor):
    names = ("replicate", "shard", "tensor")
    return {sizes}, {names}
"""


_attend = template(
    """
def attend(query, blocks):
    highest, total, output = -math.inf, 0.0, 0.0
    for keys, values in blocks:
        scores = query @ keys.mT * {factor}
        new = scores.amax(-1, keepdim=True).clamp(min=highest)
        weights, shrink = (scores - new).exp(), (highest - new).exp()
        total = {total}
        output = {output}
        highest = new
    return output / total
""",
    factor="query.size(-1) ** -0.5",
    total="shrink * total + weights.sum(-1, keepdim=True)",
    output="shrink * output + weights @ values",
)

_PLACES = """
def within_capacity(chosen, experts, capacity):
    places = F.one_hot(chosen, experts).cumsum(0)
    places = places.gather(1, chosen[:, None])[:, 0]
    return {result}
"""

WRONG = {
    "14.1": [
        (
            _groups(
                shape="tuple(reversed(sizes))",
                result="ranks.movedim(len(sizes) - 1 - dimension, -1)"
                ".reshape(-1, sizes[dimension]).tolist()",
            ),
            "The last dimension varies fastest",
        ),
        (
            _groups(result="ranks.reshape(sizes[dimension], -1).tolist()"),
            "ranks, the dimension's size",
        ),
        (_groups(result="ranks.reshape(-1, sizes[dimension]).tolist()"), "its ranks are neighbors"),
        (
            _groups(
                result="ranks.movedim(dimension, -1).flip(-1)"
                ".reshape(-1, sizes[dimension]).tolist()"
            ),
            "ascending order",
        ),
        (
            _groups(result="ranks.movedim(dimension, 0).reshape(-1, sizes[dimension]).tolist()"),
            "they differ only in their index in this dimension",
        ),
        ("def groups_of(sizes, dimension):\n    return 3", "Return a list of groups"),
    ],
    "14.2": [
        (_mesh("(tensor, gpus_per_host // tensor, hosts)", "names[::-1]"), "cross the network"),
        (_mesh("(hosts, gpus_per_host // tensor, tensor)", "names[::-1]"), "for the first name"),
        (
            _mesh("(gpus_per_host // tensor, hosts, tensor)", '("shard", "replicate", "tensor")'),
            "Only replicate groups may",
        ),
        (_mesh("(hosts, gpus_per_host, tensor)", "names"), "The product of the sizes"),
        (
            _mesh(
                "(2 * hosts, gpus_per_host // tensor // 2, tensor) if gpus_per_host > tensor "
                "else (hosts, 1, tensor)",
                "names",
            ),
            "hold one copy together",
        ),
        (
            _mesh("(hosts * gpus_per_host // tensor, tensor)", '("shard", "tensor")'),
            "The mesh needs three dimensions",
        ),
        ("def mesh_for(hosts, gpus_per_host, tensor):\n    return 3", "Return two tuples"),
    ],
    "14.3": [
        (
            "def attend(query, blocks):\n    parts = [F.scaled_dot_product_attention(query, k, v) "
            "for k, v in blocks]\n    return torch.stack(parts).mean(0)",
            "counts more",
        ),
        (
            "def attend(query, blocks):\n    for k, v in blocks:\n"
            "        out = F.scaled_dot_product_attention(query, k, v)\n    return out",
            "the result for the last block alone",
        ),
        (
            "def attend(query, blocks):\n    total, output = 0.0, 0.0\n"
            "    for keys, values in blocks:\n"
            "        weights = (query @ keys.mT * query.size(-1) ** -0.5).exp()\n"
            "        total = total + weights.sum(-1, keepdim=True)\n"
            "        output = output + weights @ values\n    return output / total",
            "exp overflows",
        ),
        (
            # One highest score for all queries: some queries' weights are all 0.
            "def attend(query, blocks):\n"
            "    highest, total, output = -math.inf, 0.0, 0.0\n"
            "    for keys, values in blocks:\n"
            "        scores = query @ keys.mT * query.size(-1) ** -0.5\n"
            "        new = max(highest, scores.max().item())\n"
            "        weights, shrink = (scores - new).exp(), math.exp(highest - new)\n"
            "        total = shrink * total + weights.sum(-1, keepdim=True)\n"
            "        output = shrink * output + weights @ values\n"
            "        highest = new\n"
            "    return output / total",
            "highest score that this query has seen",
        ),
        (
            "def attend(query, blocks):\n    keys, values = zip(*blocks)\n"
            "    return F.scaled_dot_product_attention(query, torch.cat(keys, -2), "
            "torch.cat(values, -2))",
            "Process one at a time",
        ),
        (
            "def attend(query, blocks):\n"
            "    scored = [(query @ k.mT * query.size(-1) ** -0.5, v) for k, v in blocks]\n"
            "    highest = torch.cat([s.amax(-1, True) for s, _ in scored], -1).amax(-1, True)\n"
            "    weighed = [((s - highest).exp(), v) for s, v in scored]\n"
            "    total = sum(w.sum(-1, True) for w, _ in weighed)\n"
            "    return sum(w @ v for w, v in weighed) / total",
            "drop each block",
        ),
        (_attend(output="output + weights @ values"), "multiply the sum and the output so far"),
        (_attend(factor="1.0"), "lack their factor"),
        (_attend().replace("-math.inf", "0.0"), "all scores could be below 0"),
        ("def attend(query, blocks):\n    return query.sum()", "the query's shape"),
    ],
    "14.4": [
        ("def balanced(rank, ranks):\n    return 2 * rank, 2 * rank + 1", "an early one"),
        ("def balanced(rank, ranks):\n    return rank, 2 * ranks - rank", "no rank holds"),
        ("def balanced(rank, ranks):\n    return rank", "Return the indices of two chunks"),
    ],
    "14.5": [
        (_PLACES.format(result="places < capacity"), "Too few are kept"),
        (_PLACES.format(result="places - 1 <= capacity"), "Too many are kept"),
        (_PLACES.format(result="(places <= capacity).long()"), "A comparison returns booleans"),
        (
            "def within_capacity(chosen, experts, capacity):\n"
            "    places = F.one_hot(chosen, experts).flip(0).cumsum(0).flip(0)\n"
            "    return places.gather(1, chosen[:, None])[:, 0] <= capacity",
            "keeps those that come first",
        ),
        (
            "def within_capacity(chosen, experts, capacity):\n"
            "    kept = torch.zeros_like(chosen, dtype=torch.bool)\n"
            "    for token in range(len(chosen)):\n"
            "        kept[token] = (chosen[: token + 1] == chosen[token]).sum() <= capacity\n"
            "    return kept",
            "makes the GPU wait",
        ),
        (
            "def within_capacity(chosen, experts, capacity):\n"
            "    kept = torch.zeros_like(chosen, dtype=torch.bool)\n"
            "    for expert in range(experts):\n"
            "        kept[(chosen == expert).nonzero()[:capacity]] = True\n"
            "    return kept",
            "count on the GPU",
        ),
        (
            "def within_capacity(chosen, experts, capacity):\n"
            "    counts, kept = [0] * experts, []\n"
            "    for expert in chosen.tolist():\n"
            "        counts[expert] += 1\n"
            "        kept.append(counts[expert] <= capacity)\n"
            "    return torch.tensor(kept, device=chosen.device)",
            "count on the GPU",
        ),
        (
            "def within_capacity(chosen, experts, capacity):\n"
            "    places = F.one_hot(chosen.cpu(), experts).cumsum(0)\n"
            "    return places.gather(1, chosen.cpu()[:, None])[:, 0] <= capacity",
            "where chosen is",
        ),
    ],
}
