"""Lesson 17's explorer: what casting to float8 does to values next to a large one."""

import pytest
import torch

from helpers.widgets import precision
from helpers.widgets.precision import FORMATS, SCALES, answer


def test_values_are_not_rounded_to_zero_without_an_outlier():
    for per in SCALES:
        assert answer("e4m3", per, "one value", 1).zero < 0.001
    assert answer("e4m3", "tensor", "one value", 1).error == pytest.approx(0.026, rel=0.1)


def test_e5m2_has_twice_the_error_and_a_wider_range():
    near, far = ({f: answer(f, "tensor", "one value", t) for f in FORMATS} for t in (1, 100_000))
    assert near["e5m2"].error == pytest.approx(2 * near["e4m3"].error, rel=0.1)
    assert far["e5m2"].zero < 0.01 < 0.2 < far["e4m3"].zero


def test_a_scale_per_row_helps_with_a_large_token_but_not_a_large_channel():
    of_token, of_channel = (
        answer("e4m3", "row", f"one {what}", 1e6) for what in ("token", "channel")
    )
    assert of_token.error < 0.03 and of_channel.error > 0.5


def test_power_of_two_scales_increase_the_error_by_less_than_a_fifth():
    block, mxfp8 = (answer("e4m3", per, "one value", 1) for per in ("block of 32", "MXFP8 block"))
    assert block.error < mxfp8.error < 1.2 * block.error


def test_scaled_values_stay_within_the_formats_range():
    found = answer("e4m3", "tensor", "one token", 1)
    assert found.scaled.abs().max() <= torch.finfo(torch.float8_e4m3fn).max
    assert len(found.scaled) == 255 * 512


def test_show_answer_draws_the_values_and_lists_every_scale(monkeypatch):
    shown = []
    monkeypatch.setattr(precision, "display", shown.append)
    monkeypatch.setattr(precision.plots, "scaled_numbers", lambda *given: shown.append(given))
    precision.show_answer("e4m3", "tensor", "one value", 10_000)
    (_, dtype, message, _), table = shown
    assert dtype == torch.float8_e4m3fn and "one value 10,000 times" in message
    assert [row[0] for row in table.rows] == [f"a scale per {each}" for each in SCALES]
