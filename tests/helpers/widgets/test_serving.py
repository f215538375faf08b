"""Lesson 18's explorer: a Llama on some GPUs, what fits, and how fast it responds."""

import pytest

from helpers.widgets import serving


def test_sixteen_gpus_form_two_stages_with_one_host_each():
    server = serving.server_of("405B", "H100", 16, "float8")
    assert (server.tp, server.pp, server.weight_bits, server.cache_bits) == (8, 2, 8, 8)
    assert serving.server_of("8B", "H100", 2, "bfloat16").pp == 1


def test_batch_sizes_go_up_to_the_largest_that_fits():
    server = serving.server_of("70B", "H100", 2, "bfloat16")
    points = serving.batches_of(server, 8192)
    assert [batch for batch, _, _ in points] == [1, 2, 4, 5]
    assert points[-1][2] == pytest.approx(5 / server.decode_s(5, 8192))
    assert serving.batches_of(serving.server_of("70B", "H100", 1, "bfloat16"), 8192) == []


def test_a_model_that_does_not_fit_is_reported_and_not_drawn(capsys, monkeypatch):
    drawn, tables = [], []
    monkeypatch.setattr(serving, "display", tables.append)
    monkeypatch.setattr(
        serving.plots, "latency_and_throughput", lambda curves, *_: drawn.append(curves)
    )
    serving.show_server("405B", "H100", 8, "bfloat16", 8192)
    assert "leaves no room for 8,192 tokens on 8 H100s" in capsys.readouterr().out
    serving.show_server("405B", "H100", 8, "float8", 8192)
    assert len(tables) == 2 and len(drawn) == 1
    assert tables[1].rows[2] == ("sequences of 8,192 tokens", "98 fit")
