"""Bytes on a rank of a virtual cluster match published values; none are fitted."""

import pytest

from benchmarks.published_memory import PUBLISHED_GB, ROWS, activations_gib, zero_bytes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_activation_bytes_match_published_megatron_values(row):
    kept = activations_gib(row, "none", sequence_parallel=False)
    assert kept == pytest.approx(row.kept_gib, rel=0.001)
    selective = activations_gib(row, "selective", sequence_parallel=True)
    assert selective == pytest.approx(row.selective_gib, rel=0.001)


@pytest.mark.parametrize("stage", range(4))
def test_bytes_per_gpu_match_the_zero_paper(stage):
    assert zero_bytes(stage) / 1e9 == pytest.approx(PUBLISHED_GB[stage], abs=0.05)
