"""Bytes and seconds as text."""

import pytest

from vgpu.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**30, "1 GiB"),
        (-(2**20), "-1 MiB"),
        (3 * 2**50, "3 PiB"),
        (5 * 2**60, "5120 PiB"),
    ],
)
def test_bytes_are_read_and_written_in_binary_units(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "2.5 ns"),
        (1.5e-5, "15 µs"),
        (0.0025, "2.5 ms"),
        (3.75, "3.75 s"),
        (119, "119 s"),
        (150, "2 min 30 s"),
        (179.9, "3 min 0 s"),
    ],
)
def test_seconds_are_written_in_a_suitable_unit(value, text):
    assert format_seconds(value) == text
