"""Formats bytes and seconds as readable text, and parses bytes."""

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(size_bytes: float) -> str:
    """Format bytes with a binary prefix (1 GiB is 2**30): ``format_bytes(1536) == "1.5 KiB"``."""
    value = float(size_bytes)
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{_round(value)} {unit}"
        value /= 1024
    return f"{_round(value)} {_BINARY[-1]}"


def parse_bytes(text: str) -> int:
    """Parse bytes: ``parse_bytes("1.5 GiB") == 1610612736``; 1 GB is 10**9, a bare number is bytes.

    Raises ValueError for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"expected a size such as 16GiB or 512MB, got {text!r}")
    number, prefix, binary = match.groups()
    power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
    size_bytes = int(float(number) * (1024 if binary else 1000) ** power)
    if size_bytes < 1:
        raise ValueError(f"expected at least one byte, got {text!r}")
    return size_bytes


def format_seconds(time_s: float) -> str:
    """Format seconds with a suitable prefix: ``format_seconds(0.0025) == "2.5 ms"``."""
    magnitude = abs(time_s)
    if magnitude >= 120:
        minutes, seconds = divmod(round(time_s), 60)
        return f"{minutes} min {seconds} s"
    if magnitude == 0 or magnitude >= 1:
        return f"{_round(time_s)} s"
    for factor, unit in ((1e3, "ms"), (1e6, "µs")):
        if magnitude * factor >= 1:
            return f"{_round(time_s * factor)} {unit}"
    return f"{_round(time_s * 1e9)} ns"


def _round(value: float) -> str:
    """Round to three significant digits, or to an integer from 100 on; drop trailing zeros.

    Only values below 0.0001 have an exponent.
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
