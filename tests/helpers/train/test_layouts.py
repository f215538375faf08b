"""The GPT in every layout: equal to one process at each step, and resumed in another layout."""

from dataclasses import replace

import pytest
import torch
from levels import ALL
from torch.distributed.tensor import DTensor

from helpers.train import Settings, Training, tasks
from helpers.train import __main__ as command_line
from helpers.train.tasks import DEFAULTS, GPTTask
from vgpu import launch
from vgpu.plan.layout import KINDS, Layout, check_tp, named_layout

# In double precision the layouts differ by rounding only.
SHORT = Settings("gpt", epochs=1, batch_size=48, learning_rate=0.01, width=16)
STEPS = 3
SAVED = 2


def trained(rank, world_size, settings, kind="ddp", folder=None, save_at=None):
    """On a rank: all parameters after each of the first steps, the score, and what was resumed."""
    torch.set_num_threads(1)
    # One block: what a layout costs here is Python's time for each parameter.
    tasks.LETTERS = replace(tasks.LETTERS, layers=1)
    training = Training(settings, folder, layout=named_layout(kind, world_size))
    after_each_step = []
    for inputs, targets in training.batches():
        training.train_on(inputs, targets)
        after_each_step.append(vector(training.bare))
        if training.step == save_at:
            training.save()
        if training.step == STEPS:
            break
    return after_each_step, training.score(), training.resumed_from


def vector(model):
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().cpu().flatten() for p in whole])


@pytest.fixture(scope="module")
def one_process():
    [(steps, score, _)] = launch.run(trained, 1, SHORT)
    assert len(steps) == STEPS and 3 < score < 4.6
    return steps, score


@pytest.fixture(scope="module")
def folder_of_shards(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def shards(folder_of_shards):
    """Three ranks with shards, which saved a checkpoint and went on."""
    return launch.run(trained, 3, SHORT, "fsdp", folder_of_shards, SAVED, gpu="V100")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ALL or kind not in ("hsdp", "tp")])
def test_every_step_equals_one_process_on_the_whole_batch(one_process, shards, kind):
    expected, expected_score = one_process
    ranks = 4 if kind in ("hsdp", "fsdp+tp") else 2  # groups of two
    results = shards if kind == "fsdp" else launch.run(trained, ranks, SHORT, kind, gpu="V100")
    for steps, score, _ in results:
        torch.testing.assert_close(steps, expected, rtol=1e-9, atol=1e-11)
        assert score == pytest.approx(expected_score)


def test_resumed_in_the_same_layout_it_is_the_same_bits(shards, folder_of_shards):
    for (steps, _, found), (undisturbed, *_) in zip(
        launch.run(trained, 3, SHORT, "fsdp", folder_of_shards, gpu="V100"), shards, strict=True
    ):
        assert found == folder_of_shards / f"step-{SAVED:08}"
        torch.testing.assert_close(steps, undisturbed[SAVED:], rtol=0, atol=0)


def test_a_checkpoint_goes_on_in_another_layout(one_process, shards, folder_of_shards):
    assert_goes_on(folder_of_shards, "tp", 2, one_process)


@pytest.mark.skipif(not ALL, reason="from shards to tensors always; others with TESTS=all")
@pytest.mark.parametrize(
    ("first", "first_ranks", "then", "ranks"), [("fsdp+tp", 4, "hsdp", 4), ("tp", 4, "ddp", 1)]
)
def test_others_go_on_in_another_layout(tmp_path, one_process, first, first_ranks, then, ranks):
    launch.run(trained, first_ranks, SHORT, first, tmp_path, SAVED)
    assert_goes_on(tmp_path, then, ranks, one_process)


def assert_goes_on(folder, kind, ranks, one_process):
    expected, expected_score = one_process
    for steps, score, found in launch.run(trained, ranks, SHORT, kind, folder):
        assert found == folder / f"step-{SAVED:08}"
        torch.testing.assert_close(steps, expected[SAVED:], rtol=1e-9, atol=1e-11)
        assert score == pytest.approx(expected_score)


def test_the_digits_are_sharded_as_well():
    settings = Settings(epochs=1, width=4, batch_size=48)
    [(expected, expected_score, _)] = launch.run(trained, 1, settings)
    for steps, score, _ in launch.run(trained, 2, settings, "fsdp"):
        torch.testing.assert_close(steps, expected, rtol=1e-9, atol=1e-12)
        assert score == pytest.approx(expected_score)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--parallel tp --tensor-ranks 0",
            "argument --tensor-ranks: expected a whole number from 1",
        ),
        ("--parallel hsdp", "1 ranks cannot be divided into groups for 2 copies of the model"),
        ("--parallel fsdp+tp", "1 ranks cannot be divided into groups for 2 ranks that share"),
        ("--parallel zero", "invalid choice: 'zero'"),
        ("--model gpt --dropout 0.5", "the GPT has no dropout"),
        ("--model gpt --width 20", "4 heads take a width that divides by 8; found --width 20"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(SystemExit) as left:
        command_line.main([*options.split(), "--cpu"])
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_layer_is_shared_by_as_many_ranks_as_it_has_heads():
    sizes = GPTTask(DEFAULTS["gpt"]).sizes
    check_tp(sizes, 4)
    with pytest.raises(ValueError, match="heads 4, key-value heads 4; all of them divide by 4"):
        check_tp(sizes, 8)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("ddp", 4, Layout(dp_replicate=4)),
        ("hsdp", 16, Layout(dp_replicate=2, dp_shard=8)),
        ("tp", 4, Layout(tp=4)),
        ("fsdp+tp", 8, Layout(dp_shard=4, tp=2)),
    ],
)
def test_a_layout_by_name(kind, ranks, expected):
    layout = named_layout(kind, ranks, hosts=2)
    assert layout == expected and layout.ranks == ranks


def test_a_training_says_that_its_layout_is_for_other_ranks():
    with pytest.raises(launch.RankRaised, match="dp_shard 2 is one for 2 ranks, and 1 run here"):
        launch.run(with_two_shards, 1)


def with_two_shards(rank, world_size):
    Training(SHORT, layout=Layout(dp_shard=2))


def test_a_training_has_no_stages():
    with pytest.raises(launch.RankRaised, match="pp 2 has stages; this trainer runs no pipel"):
        launch.run(with_two_stages, 2)


def with_two_stages(rank, world_size):
    Training(SHORT, layout=Layout(pp=2))
