"""Lesson 11's explorer, which runs a real step for each depth and number of segments."""

import pytest

import vgpu
from helpers import devices
from helpers.widgets.checkpointing import checkpointing_explorer, run_step, run_table


@pytest.fixture
def gpu():
    yield devices.lab(1)[0]
    vgpu.disable()


def test_segments_save_memory_and_all_but_the_last_are_recomputed(gpu):
    plain, run = run_step(9, 1, gpu), run_step(9, 3, gpu)
    assert plain.calls == [1] * 9 and plain.recomputed == 0
    assert run.calls == [2] * 6 + [1] * 3 and run.recomputed == 6
    assert run.record.peak.total_bytes < 0.7 * plain.record.peak.total_bytes


def test_the_last_segment_takes_the_remaining_layers(gpu):
    assert run_step(10, 4, gpu).calls == [2] * 6 + [1] * 4


@pytest.mark.parametrize("segments", [0, 6])
def test_run_step_rejects_an_impossible_number_of_segments(gpu, segments):
    with pytest.raises(ValueError, match="5 layers can be split into 1 to 5 segments"):
        run_step(5, segments, gpu)


def test_the_table_shows_bytes_and_calls(gpu):
    table = run_table(run_step(4, 1, gpu), run_step(4, 2, gpu))
    assert table.rows[0][3] == 4 and table.rows[1][3] == "6, 2 of them recomputed"
    assert table.rows[1][0] == "2 segments" and table.rows[1][2].endswith("%")


def test_the_sliders_redraw_and_segments_stay_within_the_depth(gpu, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "helpers.widgets.checkpointing.show_run", lambda *values: drawn.append(values)
    )
    depth, segments = checkpointing_explorer(gpu).children[0].children
    segments.value = 8
    depth.value = 5
    assert segments.max == 5 and segments.value == 5
    assert drawn[0] == (16, 4, gpu) and drawn[1] == (16, 8, gpu) and drawn[-1] == (5, 5, gpu)
