"""Checks for lesson 17.

Stochastic rounding, the number of ranks at which the error exceeds 1%, the layer that a single
scale breaks, and the choice of a recipe.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from helpers.checks.core import Wrong, exercise, expect_tensor, expect_two, for_input

_E4M3 = torch.float8_e4m3fn
_MOST = torch.finfo(_E4M3).max


@exercise("17.1", "A cast with stochastic rounding")
def stochastic_cast(answer: Callable[[torch.Tensor], Any]) -> dict[str, str]:
    count = 40_000
    shown = {}
    for sign in (1, -1):
        low = sign * random.choice([0.25, 1.0, 3.0, 40.0])
        high = _next_bfloat16(low)
        for share in (0.0, 0.625, 0.25):
            x = torch.full((count // 100, 100), low + (high - low) * share)
            given = f"{count:,} copies of {x[0, 0]:.6f}, which lies between {low:g} and {high:g}"
            hint = "Add a random number to each value's bits, then keep the upper 16."
            with for_input(given, hint):
                yours = answer(x.clone())
                expect_tensor(yours)
                if yours.dtype != torch.bfloat16 or yours.shape != x.shape:
                    raise Wrong(
                        yours=f"{yours.dtype} of shape {tuple(yours.shape)}",
                        expected=f"torch.bfloat16 of shape {tuple(x.shape)}",
                    )
                _judge_rounding(yours.float(), low, high, share)
            went = (yours.float() == high).float().mean().item()
            shown[given] = f"{went:.1%} rounded to {high:g}, {1 - went:.1%} to {low:g}"
    return shown


def _next_bfloat16(low: float) -> float:
    """Return the next bfloat16 value after ``low``, away from zero."""
    bits = torch.tensor(low).bfloat16().view(torch.int16)
    return (bits + 1).view(torch.bfloat16).item()


def _judge_rounding(yours: torch.Tensor, low: float, high: float, share: float) -> None:
    others = yours[(yours != low) & (yours != high)]
    if len(others):
        raise Wrong(
            yours=f"{others[0].item():.6g} among the results",
            expected=f"{low:g} or {high:g}, the two neighbors",
            hint="Set all 16 lower bits to zero before the cast to bfloat16, or the cast rounds again.",
        )
    went_up = yours == high
    found = went_up.double().mean().item()
    if 0 < found < 1 and any((went_up.diff(dim=dim) == 0).all() for dim in (0, 1)):
        raise Wrong(
            yours="whole rows or columns rounded the same way",
            expected="an independent choice for each value",
            hint="Each value needs its own random number: draw as many as x has values.",
        )
    # 40,000 draws: three standard deviations are below 0.7%.
    if abs(found - share) > 0.015:
        if share == 0:
            hint = (
                "bfloat16 can represent this value, so it must stay as it is. Set the lower 16 bits to "
                "zero before the cast to bfloat16, or the cast rounds again."
            )
        elif found in (0.0, 1.0):
            hint = "All values are rounded the same way. Each value needs its own random number."
        elif abs(found - 0.5) < 0.015:
            hint = "You round up and down equally often. The nearer neighbor must be more likely."
        else:
            hint = "The random number must go from 0 to 65,535, like the bits that are dropped."
        raise Wrong(yours=f"{found:.1%} rounded to {high:g}", expected=f"{share:.1%}", hint=hint)


@exercise("17.2", "How many ranks until a 1% error")
def ranks_until(answer: Callable[[torch.Tensor, float], Any]) -> dict[str, str]:
    shown = {}
    cases = [(0.3, 8, 0.001), (0.0, 96, 0.01), (1.0, 96, 0.01), (0.3, 160, 0.01), (0.3, 160, 0.005)]
    cases.append((0.1, 8, 0.5))
    for common, ranks, most in cases:
        size = random.randint(100, 300)
        parts = torch.randn(ranks, size) + common * torch.randn(size)
        if common == 1.0:
            parts[0] = 0  # the sum of one part is exact
            parts[1:, 0] *= 1000
        expected, errors = _until(parts, most)
        given = f"{ranks} ranks with {size} values each, an error of more than {most:.1%}"
        with for_input(given, "Return a number of ranks, or None."):
            yours = answer(parts.clone(), most)
            if yours != expected or isinstance(yours, bool):
                raise Wrong(
                    yours=repr(yours),
                    expected=repr(expected),
                    hint=_ranks_hint(yours, expected, parts, most),
                )
        shown[given] = (
            f"never: {errors[-1]:.2%} on {ranks} ranks"
            if yours is None
            else f"{yours} ranks, off by {errors[yours - 1]:.2%}"
        )
    return shown


def _until(
    parts: torch.Tensor,
    most: float,
    dtype: torch.dtype = torch.bfloat16,
    adds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[int | None, list[float]]:
    """Return the smallest number of ranks whose error exceeds ``most``, and all errors.

    ``adds`` adds a part to a sum of type ``dtype``; by default, it casts the part first.
    """
    rough, exact, errors = parts[0].to(dtype), parts[0].double(), []
    for count, part in enumerate(parts, start=1):
        if count > 1:
            rough = adds(rough, part) if adds else rough + part.to(dtype)
            exact = exact + part.double()
        norm = exact.norm().item()
        errors.append((rough.double() - exact).norm().item() / norm if norm else 0.0)
    return next((n for n, error in enumerate(errors, 1) if error > most), None), errors


def _ranks_hint(yours: Any, expected: int | None, parts: torch.Tensor, most: float) -> str:
    if isinstance(yours, int) and isinstance(expected, int) and yours == expected - 1:
        return "Off by one: list indices start at 0, but the first part already counts as one rank."
    if yours is None:
        return "The error does become that large if each partial sum is in bfloat16."
    if yours == _until(parts.bfloat16().float(), most, torch.float32)[0]:
        return "Only the parts are rounded. Each partial sum must be in bfloat16, too."
    if yours == _until(parts, most, adds=lambda rough, part: (rough + part).bfloat16())[0]:
        return "Cast each part to bfloat16 before you add it: that's how it is sent."
    if yours == _until(parts.bfloat16().float(), most)[0]:
        return (
            "For the float64 sum, add the float32 parts, as they are before the cast to bfloat16."
        )
    if expected is None:
        return "The error never exceeds the limit. Return None after the last rank."
    return "Compare after each rank: the bfloat16 sum and the float64 sum of the float32 parts."


@exercise("17.3", "The layer that one scale breaks")
def worst_layer(answer: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, str]:
    shown = {}
    for breaks in (2, 4, random.choice((2, 4))):
        activations = _some_layers(breaks)
        shares = {name: _share_lost(x) for name, x in activations.items()}
        worst = max(shares, key=lambda name: shares[name])
        sizes = ", ".join(f"{name} up to {x.abs().max():.2g}" for name, x in activations.items())
        given = f"layers {sizes}"
        with for_input(given, "Return a layer's name, and a share from 0 to 1."):
            yours = answer({name: x.clone() for name, x in activations.items()})
            expect_two(yours, "a name and a share")
            name, share = yours[0], float(yours[1])
            if name not in shares:
                raise Wrong(yours=repr(name), expected=f"one of {', '.join(shares)}")
            if name != worst:
                raise Wrong(
                    yours=f"{name}: {shares[name]:.1%} become 0",
                    expected=f"{worst}: {shares[worst]:.1%} become 0",
                    hint=_layer_hint(name, activations),
                )
            if abs(share - shares[worst]) > 1e-4:
                raise Wrong(
                    yours=f"{name}, {share:.4f}",
                    expected=f"{worst}, {shares[worst]:.4f}",
                    hint=_share_hint(share, activations[worst], shares[worst]),
                )
        shown[given] = f"{name}: {share:.1%} become 0"
    return shown


def _some_layers(breaks: int) -> dict[str, torch.Tensor]:
    """Return five randomly named layers; a per-tensor scale breaks the one at index ``breaks``."""
    made = [torch.randn(64, 96) for _ in range(5)]
    made[0] *= 1e6  # all large: the scale takes care of it
    made[1][3, 5] = 500.0  # an outlier that float8 can handle
    made[2] = made[2].relu()  # half are already zeros
    made[3] *= 1e-6  # all small
    made[breaks][:, 7] = 1.0 + torch.rand(64)
    made[breaks][5, 7] = random.uniform(2e5, 4e5)
    names = random.sample(["embedding", "qkv", "project", "up", "down"], 5)
    return dict(zip(names, made, strict=True))


def _share_lost(x: torch.Tensor) -> float:
    before = x != 0
    return ((_rounded(x, "tensor") == 0) & before).sum().item() / before.sum().item()


def _share_hint(share: float, x: torch.Tensor, expected: float) -> str:
    if abs(share - 100 * expected) < 0.1:
        return "That's a percentage. Return a share, from 0 to 1."
    if (x == 0).any():
        return (
            "Count only values that weren't 0 before, and divide by the number of nonzero values."
        )
    return "Divide the number of values that become 0 by the layer's number of nonzero values."


def _layer_hint(name: str, activations: Mapping[str, torch.Tensor]) -> str:
    if name == max(activations, key=lambda each: activations[each].abs().amax().item()):
        return "Large values alone break nothing: a scale brings them to 448."
    if name == min(activations, key=lambda each: activations[each].abs().amax().item()):
        return "Small values alone break nothing: each layer has its own scale."
    if (activations[name] == 0).any():
        return "Most of its zeros were 0 before the cast. Count only those that weren't."
    return "Scale each layer by its own largest value, cast, and count what became 0."


_RECIPES = ("bfloat16", "tensor", "row", "block of 32")
# Outliers, error limit, milliseconds of some recipes, and the answer. Every limit is far enough
# from the recipes' matmul errors that random draws don't change the answer. Some limits lie between
# a matmul's error and that of only one factor, or of the largest element, so that an answer that
# compares one of those with the limit is wrong.
_LAYERS = (
    ("none", 0.05, {"tensor": 4, "row": 5, "block of 32": 6, "bfloat16": 3}, "bfloat16"),
    ("none", 0.03, {"tensor": 2, "row": 3, "block of 32": 4, "bfloat16": 5}, "bfloat16"),
    ("weight", 0.07, {"bfloat16": 5, "block of 32": 4, "row": 3, "tensor": 2}, "block of 32"),
    ("x", 0.07, {"tensor": 2, "row": 3, "block of 32": 4, "bfloat16": 5}, "block of 32"),
    ("token", 0.12, {"row": 3, "tensor": 2, "bfloat16": 5, "block of 32": 4}, "row"),
    ("token", 0.05, {"row": 3, "tensor": 2, "bfloat16": 5, "block of 32": 4}, "block of 32"),
    ("none", 0.002, {"block of 32": 4, "tensor": 2, "bfloat16": 5, "row": 3}, None),
    ("none", 0.06, {"row": 3, "block of 32": 2}, "block of 32"),
)
_OUTLIERS = {
    "none": "no outliers",
    "weight": "a channel of the weight 100,000 times as large",
    "x": "a channel of x 100,000 times as large",
    "token": "one value of x 400,000 times as large",
}


@exercise("17.4", "Choose a recipe")
def choose_recipe(answer: Callable[..., Any]) -> dict[str, str]:
    shown = {}
    for outliers, most, times_ms, expected in random.sample(_LAYERS, len(_LAYERS)):
        x, weight = _factors(outliers)
        errors = {recipe: _error_of(x, weight, recipe) for recipe in _RECIPES}
        times_s = {recipe: 1e-3 * time_ms for recipe, time_ms in times_ms.items()}
        given = f"{_OUTLIERS[outliers]}; errors at most {most:.1%}; " + ", ".join(
            f"{recipe} {time_ms} ms" for recipe, time_ms in times_ms.items()
        )
        with for_input(given, "Return a recipe's name, or None."):
            yours = answer(x.clone(), weight.clone(), most, dict(times_s))
            if yours != expected:
                raise Wrong(
                    yours=_recipe_text(yours, errors),
                    expected=_recipe_text(expected, errors),
                    hint=_recipe_hint(yours, expected, times_s),
                )
        shown[given] = _recipe_text(yours, errors)
    return shown


def _factors(outliers: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` (tokens, inputs) and ``weight`` (outputs, inputs); no outliers in their matmul."""
    x, weight = torch.randn(48, 512), torch.randn(32, 512) / 8
    channel = random.randrange(512)
    if outliers == "weight":
        weight[:, channel] *= 1e5
        x[:, channel] /= 1e5
    elif outliers == "x":
        x[:, channel] *= 1e5
        weight[:, channel] /= 1e5
    elif outliers == "token":
        x[random.randrange(48), channel] = 4e5
        weight[:, channel] /= 1e5
    return x, weight


def _rounded(x: torch.Tensor, recipe: str) -> torch.Tensor:
    if recipe == "bfloat16":
        return x.bfloat16().float()
    if recipe == "block of 32":
        return _rounded(x.unflatten(-1, (-1, 32)), "row").flatten(-2)
    largest = x.abs().amax() if recipe == "tensor" else x.abs().amax(-1, keepdim=True)
    scale = _MOST / largest.clamp(min=1e-30)
    return (x * scale).clamp(-_MOST, _MOST).to(_E4M3).float() / scale


def _error_of(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> float:
    wanted = x @ weight.T
    found = _rounded(x, recipe) @ _rounded(weight, recipe).T
    return ((found - wanted).norm() / wanted.norm()).item()


def _recipe_text(recipe: Any, errors: Mapping[str, float]) -> str:
    return f"{recipe!r}, off by {errors[recipe]:.2%}" if recipe in errors else repr(recipe)


def _recipe_hint(yours: Any, expected: str | None, times_s: Mapping[str, float]) -> str:
    if yours is None:
        return "There is a recipe that's good enough."
    if yours not in times_s:
        return "Return one of the names in times_s, or None."
    if expected is None or times_s[yours] < times_s[expected]:
        return (
            "This recipe's error exceeds the limit. Round both factors, multiply, and divide the "
            "norm of the error by the norm of the exact result."
        )
    return "This recipe is good enough, but a faster one is, too."
