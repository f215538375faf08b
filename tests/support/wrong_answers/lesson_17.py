"""Typical mistakes in the exercises of lesson 17, and what the learner must be told."""

from wrong_answers import template

_ADDED = "torch.randint(0, 2**16, x.shape, dtype=torch.int32)"
_KEPT = "(bits & -(2**16)).view(torch.float32).bfloat16()"
_stochastic = template(
    "def stochastic(x):\n"
    "    bits = x.view(torch.int32)\n"
    "    bits = bits + {added}\n"
    "    return {kept}",
    added=_ADDED,
    kept=_KEPT,
)

_ranks = template(
    "def ranks_until(parts, most):\n"
    "    rough = torch.zeros(parts.size(1), dtype={dtype})\n"
    "    exact = torch.zeros(parts.size(1), dtype=torch.float64)\n"
    "    for count, part in enumerate(parts, start={start}):\n"
    "        rough = {sum}\n"
    "        exact = exact + {part}.double()\n"
    "        if (rough.double() - exact).norm() > most * exact.norm():\n"
    "            return count\n"
    "    return {end}",
    dtype="torch.bfloat16",
    sum="rough + part.bfloat16()",
    part="part",
    start="1",
    end="None",
)

_SHARE = "(zero & (x != 0)).sum().item() / (x != 0).sum().item()"
_layer = template(
    "def worst_layer(activations):\n"
    "    def share(x):\n"
    "        zero = cast(x, {scale}).float() == 0\n"
    "        return {share}\n"
    "    shares = {{name: share(x) for name, x in activations.items()}}\n"
    "    worst = max(shares, key=shares.get)\n"
    "    return {result}",
    scale="scale_of(x)",
    share=_SHARE,
    result="worst, shares[worst]",
)

_choose = template(
    "def choose(x, weight, most, times_s):\n"
    "    def off(found, wanted):\n"
    "        return (found - wanted).norm() / wanted.norm()\n"
    "    wanted = x @ weight.T\n"
    "    for recipe in {order}:\n"
    "        if recipe == 'bfloat16':\n"
    "            a, b = x.bfloat16().float(), weight.bfloat16().float()\n"
    "        else:\n"
    "            a, b = rounded(x, recipe), rounded(weight, recipe)\n"
    "        if {good}:\n"
    "            return recipe\n"
    "    return {end}",
    order="sorted(times_s, key=times_s.get)",
    good="off(a @ b.T, wanted) <= most",
    end="None",
)

WRONG = {
    "17.1": [
        ("def stochastic(x):\n    return x.bfloat16()", "rounded the same way"),
        (
            _stochastic(added="torch.randint(0, 2**16, (), dtype=torch.int32)"),
            "its own random number",
        ),
        (
            _stochastic(added="torch.randint(0, 2**16, x.shape[1:], dtype=torch.int32)"),
            "as many as x has values",
        ),
        (
            _stochastic(added="torch.randint(0, 2**16, (len(x), 1), dtype=torch.int32)"),
            "as many as x has values",
        ),
        (_stochastic(kept="bits.view(torch.float32).bfloat16()"), "Set the lower 16 bits to zero"),
        (_stochastic(added=_ADDED.replace("2**16", "2**15")), "from 0 to 65,535"),
        (
            "def stochastic(x):\n"
            "    low = (x.view(torch.int32) & -(2**16)).view(torch.float32)\n"
            "    high = ((x.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)\n"
            "    return torch.where((torch.rand_like(x) < 0.5) & (x != low), high, low).bfloat16()",
            "You round up and down equally often",
        ),
        (
            "def stochastic(x):\n"
            "    low = (x.view(torch.int32) & -(2**16)).view(torch.float32)\n"
            "    high = ((x.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)\n"
            "    return torch.where(torch.rand_like(x) < 0.5, high, low).bfloat16()",
            "it must stay as it is",
        ),
        (_stochastic(kept=_KEPT.removesuffix(".bfloat16()")), "keep the upper 16"),
        ("def stochastic(x):\n    return x.tolist()", "Return a tensor"),
    ],
    "17.2": [
        (_ranks(start="0"), "Off by one"),
        (_ranks(dtype="torch.float32"), "ach partial sum"),
        (_ranks(sum="(rough + part).bfloat16()"), "part"),
        (_ranks(sum="rough.add_(part)"), "part"),
        (_ranks(part="part.bfloat16()"), "before the cast"),
        (_ranks(end="len(parts)"), "The error never"),
        ("def ranks_until(parts, most):\n    return None", "The error does become that large"),
        (
            "def ranks_until(parts, most):\n    return 3 if most < 0.1 else None",
            "Compare after each",
        ),
    ],
    "17.3": [
        (
            "def worst_layer(activations):\n"
            "    worst = max(activations, key=lambda name: activations[name].abs().amax())\n"
            "    return worst, 1.0",
            "Large values alone break nothing",
        ),
        (_layer(scale="1.0"), "Small values alone break nothing"),
        (_layer(share="zero.float().mean().item()"), "0 before"),
        (
            _layer(
                share=_SHARE.replace(
                    "sum().item() / (x != 0).", "sum().item() / x.numel() + 0 * (x != 0)."
                )
            ),
            "ivide",
        ),
        (_layer(result="worst, 100 * shares[worst]"), "a percentage"),
        (_layer(result="worst"), "a share from 0 to 1"),
        (_layer(result="0, 0.5"), "a share from 0 to 1"),
    ],
    "17.4": [
        (_choose(order="times_s"), "a faster one"),
        (_choose(good="True"), "error exceeds the limit"),
        (_choose(end="recipe"), "error exceeds the limit"),
        (_choose(good="False"), "There is a recipe"),
        # Errors of the factors, of one rounded factor's matmul, and of the largest value.
        (_choose(good="off(a, x) <= most"), "Round both factors"),
        (_choose(good="off(b, weight) <= most"), "Round both factors"),
        (_choose(good="max(off(a, x), off(b, weight)) <= most"), "Round both factors"),
        (_choose(good="(off(a, x)**2 + off(b, weight)**2)**0.5 <= most"), "Round both factors"),
        (_choose(good="off(a @ weight.T, wanted) <= most"), "Round both factors"),
        (_choose(good="off(x @ b.T, wanted) <= most"), "Round both factors"),
        (_choose(good="(recipe == 'bfloat16' or 0.038 <= most)"), ""),
        (_choose(good="(a @ b.T - wanted).abs().max() <= most * wanted.abs().max()"), ""),
        ("def choose(x, weight, most, times_s):\n    return 'float8'", "one of the names"),
    ],
}
