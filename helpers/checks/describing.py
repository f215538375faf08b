"""Describe values, and where two values differ most.

``told_apart`` never describes two unequal values the same way.
"""

import math
from typing import Any

import torch
from torch import nn

_SMALL = 12  # a tensor with at most this many elements is shown in full


def describe(value: Any, limit: int = 300) -> str:
    """Describe a value briefly: strings in quotes, large tensors by shape, modules by class."""
    text = _text(value)
    return text if len(text) <= limit else text[: limit - 6] + " [...]"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > _SMALL:
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, {kind}, on {value.device}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, torch.device):
        return str(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_text(part)}" for key, part in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(_text, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def told_apart(yours: Any, expected: Any) -> tuple[str, str]:
    """Describe both values; the descriptions differ if the values do."""
    if _are_numbers(yours, expected) and not isinstance(yours, int):
        return _two_numbers(yours, expected)
    if _alike(yours, expected) and yours.numel() > _SMALL:
        index = _worst(yours, expected)
        mine, theirs = _two_numbers(yours[index].item(), expected[index].item())
        return f"{mine} at {list(index)} of {describe(yours)}", f"{theirs} there"
    texts = describe(yours), describe(expected)
    if texts[0] == texts[1] and _alike(yours, expected):
        texts = describe(yours.tolist()), describe(expected.tolist())
    if texts[0] == texts[1]:
        kinds = type(yours).__name__, type(expected).__name__
        texts = f"{texts[0]} ({kinds[0]})", f"{texts[1]} ({kinds[1]})"
    return texts if texts[0] != texts[1] else (f"{texts[0]}, but not an equal one", texts[1])


def difference(yours: Any, expected: Any) -> str:
    """Say how much and where two values differ most; "" if their descriptions already say so."""
    if isinstance(yours, torch.Tensor) and isinstance(expected, torch.Tensor):
        return _tensors_differ(yours, expected)
    if _are_numbers(yours, expected):
        whole = isinstance(yours, int) and isinstance(expected, int)
        return "" if whole or yours == expected else _shortest(abs(yours - expected))
    if isinstance(yours, dict) and isinstance(expected, dict):
        return _dicts_differ(yours, expected)
    if isinstance(yours, list | tuple) and isinstance(expected, list | tuple):
        return _sequences_differ(yours, expected)
    return ""


def _tensors_differ(yours: torch.Tensor, expected: torch.Tensor) -> str:
    for name in ("shape", "dtype", "device"):
        mine, theirs = getattr(yours, name), getattr(expected, name)
        if mine != theirs:
            return f"{name} {_plain(mine)}, not {_plain(theirs)}"
    if yours.dim() == 0:
        return difference(yours.item(), expected.item())
    off, index = _distance(yours, expected), _worst(yours, expected)
    differ = int((off > 0).sum())
    return (
        f"at most {_shortest(off[index].item())}, at {list(index)}; "
        f"{differ} of {yours.numel()} elements differ"
    )


def _dicts_differ(yours: dict, expected: dict) -> str:
    lacking = [key for key in expected if key not in yours]
    extra = [key for key in yours if key not in expected]
    if lacking or extra:
        parts = (("lacks", lacking), ("also has", extra))
        return "; ".join(f"{word} {', '.join(map(repr, keys))}" for word, keys in parts if keys)
    return _entries_differ([(key, yours[key], expected[key]) for key in expected])


def _sequences_differ(yours: list | tuple, expected: list | tuple) -> str:
    if type(yours) is not type(expected) or len(yours) != len(expected):
        kinds = (f"a {type(part).__name__} of {len(part)}" for part in (yours, expected))
        return ", not ".join(kinds)
    rows = zip(yours, expected, strict=True)
    return _entries_differ([(index, mine, theirs) for index, (mine, theirs) in enumerate(rows)])


def _entries_differ(rows: list[tuple[Any, Any, Any]]) -> str:
    differ = [row for row in rows if not _same(row[1], row[2])]
    if not differ or len(rows) == 1:
        return ""
    if all(_are_numbers(mine, theirs) for _, mine, theirs in differ):
        key, mine, theirs = max(differ, key=lambda row: abs(row[1] - row[2]))
        which = "most"
    else:
        (key, mine, theirs), which = differ[0], "first"
    texts = told_apart(mine, theirs)
    return f"{which} at [{key!r}]: {texts[0]}, not {texts[1]}; {len(differ)} of {len(rows)} differ"


def _same(yours: Any, expected: Any) -> bool:
    if isinstance(yours, torch.Tensor) and isinstance(expected, torch.Tensor):
        return not _tensors_differ(yours, expected) or torch.equal(yours, expected)
    return bool(yours == expected)


def _alike(yours: Any, expected: Any) -> bool:
    """Return whether both are tensors of the same shape, dtype and device."""
    if not (isinstance(yours, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    names = ("shape", "dtype", "device")
    return all(getattr(yours, name) == getattr(expected, name) for name in names)


def _distance(yours: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the elementwise distance, on the CPU; infinite between NaN and a number."""
    wide = torch.complex128 if yours.is_complex() else torch.float64
    mine, theirs = (part.detach().cpu().to(wide) for part in (yours, expected))
    off = (mine - theirs).abs()
    one_nan = mine.isnan() != theirs.isnan()
    # Infinity minus infinity is NaN, too, and no distance.
    return torch.where(one_nan, math.inf, off.nan_to_num(nan=0.0, posinf=math.inf))


def _worst(yours: torch.Tensor, expected: torch.Tensor) -> tuple[int, ...]:
    off = _distance(yours, expected)
    return tuple(int(part) for part in torch.unravel_index(off.argmax(), off.shape))


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _two_numbers(yours: Any, expected: Any) -> tuple[str, str]:
    """Return two numbers with as many digits as needed to distinguish them, at least four."""
    for digits in (4, 6, 9, 17):
        texts = _digits(yours, digits), _digits(expected, digits)
        if texts[0] != texts[1]:
            return texts
    return repr(yours), repr(expected)


def _digits(value: Any, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else repr(value)


def _shortest(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
