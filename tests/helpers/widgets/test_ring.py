"""The ring explorer: its states follow the ring algorithm, and its figure and sliders work."""

from itertools import pairwise

import matplotlib.pyplot as plt
import pytest

from helpers.plots.collectives import origins
from helpers.widgets import ring


@pytest.fixture
def shown(monkeypatch):
    """The text on each figure that would have been shown."""
    figures = []

    def keep(picture):
        figures.append([text.get_text() for axes in plt.gcf().axes for text in axes.texts])

    monkeypatch.setattr("helpers.plots.style.display", keep)
    return figures


@pytest.mark.parametrize("ranks", range(1, ring.MOST_RANKS + 1))
def test_every_rank_ends_with_every_chunks_sum(ranks):
    states = ring.ring_states(ranks)
    assert len(states) == 1 + 2 * (ranks - 1)
    ones = int("1" * ranks)
    assert states[-1].held == [[ones * chunk for chunk in range(1, ranks + 1)]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_each_rank_has_one_complete_chunk_halfway_through(ranks):
    half_way = ring.ring_states(ranks)[ranks - 1]
    for rank, numbers in enumerate(half_way.held):
        complete = [chunk for chunk, n in enumerate(numbers) if len(origins(n)) == ranks]
        assert complete == [(rank + 1) % ranks]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_each_rank_sends_one_chunk_per_step_and_only_its_neighbors_copy_changes(ranks):
    states = ring.ring_states(ranks)
    for before, after in pairwise(states):
        assert sorted(after.sent) == list(range(ranks))
        arrived = {((rank + 1) % ranks, chunk) for rank, chunk in enumerate(after.sent)}
        changed = {
            (rank, chunk)
            for rank in range(ranks)
            for chunk in range(ranks)
            if before.held[rank][chunk] != after.held[rank][chunk]
        }
        assert changed == arrived


def test_origins_reads_the_ranks_off_a_number():
    assert origins(303) == [0, 2]
    assert origins(0) == []


def test_the_figure_shows_the_states_values(shown, capsys):
    ring.show_ring(3, 2)
    (texts,) = shown
    numbers = [str(n) for row in ring.ring_states(3)[2].held for n in row]
    assert [text for text in texts if text.isdecimal()] == numbers
    assert "2/3 of a tensor" in capsys.readouterr().out


def test_a_step_past_the_end_shows_the_final_state(shown, capsys):
    ring.show_ring(2, 99)
    assert shown[0].count("11") == shown[0].count("22") == 2
    assert "the all-reduce is done" in capsys.readouterr().out


def test_the_sliders_redraw_and_stay_within_the_ring(shown):
    explorer = ring.ring_explorer()
    ranks, step = explorer.children[0].children
    ranks.value = 8
    step.value = step.max
    assert step.max == 14
    ranks.value = 2
    assert step.value == step.max == 2
    # The last figure has the sliders' values: no update failed silently.
    assert "11" in shown[-1] and "rank 1" in shown[-1] and "rank 2" not in shown[-1]
