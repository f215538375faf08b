"""Lesson 10's explorer: time, bubble and memory of a pipeline, by schedule, sizes and GPU."""

import math

import pytest
import torch

import vgpu
from helpers.widgets.pipeline import (
    BATCH,
    BYTES_PER_PARAMETER,
    LAYERS,
    TOKENS,
    WIDTH,
    answer,
    answer_table,
    layer_cost,
    pipeline_explorer,
    show_answer,
)
from vgpu.plan.schedules import KINDS


@pytest.fixture
def drawn(monkeypatch):
    """What would have been drawn: each figure's simulated schedule and options."""
    figures = []
    monkeypatch.setattr(
        "helpers.plots.schedule", lambda *a, **options: figures.append((a, options))
    )
    return figures


@pytest.mark.parametrize("kind", KINDS)
def test_answer_has_the_simulated_schedules_bubble_and_micro_batches(kind):
    found = answer(kind, 4, 8)
    # Forward takes 1 and backward 2, so eight micro-batches on each of four devices take 4 × 24.
    assert found.alone == 4 * 24
    assert math.isclose(found.simulated.bubble, 1 - found.alone / (4 * found.simulated.makespan))
    rows = answer_table(found).rows
    assert rows[1][1] == f"{found.simulated.bubble:.1%}"
    assert rows[2][1] == ", ".join(map(str, found.in_flight))


def test_a_layers_cost_is_recorded_on_one_gpu(monkeypatch):
    cost = layer_cost("H100", 8)
    # Per layer, 12 D² parameters plus biases and norms; forward takes 2 FLOPs per parameter and
    # token.
    assert 12 * WIDTH**2 < cost.parameters < 12.1 * WIDTH**2
    least_s = 2 * 12 * WIDTH**2 * 8 * TOKENS / vgpu.PRESETS["H100"].tensor_flop_per_s
    assert least_s < cost.forward_s < 10 * least_s
    assert 1.5 * cost.forward_s < cost.backward_s < 3 * cost.forward_s
    assert cost.activation_bytes > 8 * TOKENS * WIDTH * 2
    # A micro-batch twice as large keeps twice the bytes, except for a random generator's state.
    twice = layer_cost("H100", 16).activation_bytes
    assert twice == pytest.approx(2 * cost.activation_bytes, rel=1e-5)


def test_answer_computes_time_and_memory_for_a_named_gpu():
    one, eight = answer("1F1B", 1, 16, "H100"), answer("1F1B", 8, 16, "H100")
    assert eight.cost == one.cost
    assert math.isclose(eight.alone, one.simulated.makespan, rel_tol=1e-9)
    assert 8 * (1 - eight.simulated.bubble) == pytest.approx(eight.alone / eight.simulated.makespan)
    held = LAYERS * one.cost.parameters * sum(BYTES_PER_PARAMETER.values())
    assert one.peak_bytes() == [held + LAYERS * one.cost.activation_bytes]
    assert eight.peak_bytes()[7] == (held + LAYERS * one.cost.activation_bytes) // 8
    assert eight.peak_bytes() == sorted(eight.peak_bytes(), reverse=True)


def test_a_step_on_a_faster_gpu_is_faster_and_more_fits_on_a_larger_one():
    names = ("K80", "V100", "A100", "H100")
    found = [answer("1F1B", 4, 8, name) for name in names]
    times = [each.simulated.makespan for each in found]
    assert times == sorted(times, reverse=True)
    rows = [answer_table(each).rows[2] for each in found]
    # GPUs with 12 to 80 GiB. A K80 has no fused attention and keeps the scores; a V100's fused
    # kernel returns its output in a different memory layout, which is copied.
    k80, v100, a100, h100 = (found_on.peak_bytes()[0] for found_on in found)
    assert k80 > v100 > a100 == h100
    assert "of 12 GiB; fits on 0 of 4" in rows[0][2]
    assert "of 80 GiB; fits on 4 of 4" in rows[3][2]


def test_the_network_needs_more_than_one_gpu():
    memory_bytes = vgpu.PRESETS["H100"].memory_bytes
    (needed,) = answer("1F1B", 1, 64, "H100").peak_bytes()
    assert needed > memory_bytes
    assert max(answer("1F1B", 2, 64, "H100").peak_bytes()) < memory_bytes


def test_interleaving_keeps_more_activations_in_smaller_pieces():
    plain, woven = answer("1F1B", 4, 8, "A100"), answer("interleaved 1F1B, 2 chunks", 4, 8, "A100")
    activations = 8 * plain.cost.activation_bytes
    held = plain.peak_bytes()[0] - 4 * activations
    # 2 p + p - 1 pieces, each with half of a device's layers.
    assert woven.peak_bytes()[0] == held + 11 * activations // 2


def test_layer_cost_leaves_virtual_gpus_as_they_were():
    with vgpu.enable(3, gpu="V100"):
        layer_cost.__wrapped__("K80", 1)
        assert torch.get_device_module("vgpu").device_count() == 3
        assert "V100" in torch.get_device_module("vgpu").get_device_name(0)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (("interleaved 1F1B, 2 chunks", 8, 4), "4 isn't a multiple of 8"),
        (("1F1B", 8, BATCH * 2, "H100"), "don't divide evenly"),
    ],
)
def test_show_answer_explains_an_impossible_schedule(choice, said, drawn, capsys):
    show_answer(*choice)
    assert said in capsys.readouterr().out
    assert drawn == []


def test_every_control_redraws(drawn):
    explorer = pipeline_explorer()
    (kind, gpu), (devices, micro_batches) = (row.children for row in explorer.children[:2])
    kind.value = "zero bubble (ZB-H1)"
    devices.value = 8
    micro_batches.value = 32
    gpu.value = "H100"
    played = [arguments[0] for arguments, _ in drawn]
    assert [p.schedule.name for p in played[:2]] == ["1F1B", "zero bubble (ZB-H1)"]
    assert [p.schedule.devices for p in played] == [4, 4, 8, 8, 8]
    assert [p.schedule.micro_batches for p in played] == [8, 8, 8, 32, 32]
    assert [options.get("unit") for _, options in drawn] == [None, None, None, None, "ms"]
    assert played[-1].makespan == answer("zero bubble (ZB-H1)", 8, 32, "H100").simulated.makespan
    kind.value, micro_batches.value = "interleaved 1F1B, 2 chunks", 4
    (told,) = explorer.children[-1].outputs
    assert len(drawn) == 6 and "a multiple of 8" in told["text"]
