"""The layout search: what it skips, what it extrapolates, and what it prints."""

import dataclasses
import itertools
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from levels import sample

from vgpu.launch import launcher
from vgpu.plan import Layout, Plan, extrapolate, layout_search, predict, search
from vgpu.plan import __main__ as command
from vgpu.plan.experts import ExpertSizes
from vgpu.plan.plan import on_cluster
from vgpu.plan.recorded_step import Rank
from vgpu.plan.transformer import TransformerSizes

SIZES = TransformerSizes(6, 256, 8, 4, 512, 1024, sequence=128)
GUESS = Plan(SIZES, Layout(dp_shard=2), sequence=128, gpus_per_host=2)
# Two hosts with one GPU each: no tensor parallelism, so fewer plans to try.
APART = dataclasses.replace(GUESS, sizes=dataclasses.replace(SIZES, layers=5), gpus_per_host=1)


def with_memory(plan, size_bytes):
    return dataclasses.replace(plan, gpu=dataclasses.replace(plan.spec, memory_bytes=size_bytes))


@pytest.mark.parametrize(
    ("layout", "recompute", "again"),
    sample(
        [
            (Layout(1, 2, 2), "selective", True),
            (Layout(2, 2), "full", False),
            (Layout(dp_shard=4), "none", True),
            (Layout(1, 2, 2), "full", False),
        ],
        2,
    ),
)
def test_a_few_blocks_predict_the_full_models_time_and_bytes(layout, again, recompute):
    plan = dataclasses.replace(
        GUESS, layout=layout, batch=4, recompute=recompute, reshard_after_forward=again
    )
    step = predict(plan)
    (one,) = layout_search._tried([layout_search.Candidate(plan)])
    assert one.seconds == pytest.approx(step.seconds, rel=1e-3)
    assert one.allocated_bytes == pytest.approx(step.allocated_bytes, rel=1e-3)
    assert 0.7 * step.allocated_bytes < plan.least_bytes() < step.allocated_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full", "recompute_every": 3},
        {"sizes": dataclasses.replace(SIZES, experts=ExpertSizes(4, 2, 256, dense_layers=5))},
    ],
    ids=["every third block", "five dense layers"],
)
def test_enough_blocks_are_recorded_if_they_differ(changes):
    plan = dataclasses.replace(GUESS, batch=4, **changes)
    plan = dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=12))
    step, fast = predict(plan), extrapolate(plan)
    (one,) = layout_search._tried([layout_search.Candidate(plan)])
    assert one.seconds == fast.seconds() == pytest.approx(step.seconds, rel=1e-2)
    assert one.allocated_bytes == int(sum(fast.bytes_by_cause.values()))
    assert one.allocated_bytes == pytest.approx(step.allocated_bytes, rel=2e-2)


def test_skipped_plans_are_not_faster_or_do_not_fit(monkeypatch):
    """Every plan is also predicted in full, with one rank for all plans of a layout."""
    monkeypatch.setattr(layout_search, "_confirm", lambda *_: None)  # compare only what's allocated
    plan = with_memory(APART, 34_000_000)
    found = search(plan, sequences=2)
    whole = {}
    for _, group in itertools.groupby(found.candidates, key=lambda one: one.plan.layout):
        alike = list(group)
        with on_cluster(alike[0].plan):
            rank = Rank(alike[0].plan, takes_a_step=False)
            whole |= {id(one): rank.recorded(one.plan) for one in alike}
    fitting = [
        one for one in found.candidates if whole[id(one)].allocated_bytes <= plan.spec.memory_bytes
    ]
    again = [one for one in fitting if one.reason]
    assert {one.reason for one in again} == {layout_search._MORE_WORK}
    assert [one for one in found.best if one not in fitting] == []
    fastest = max(whole[id(one)].tokens_per_s for one in fitting)
    assert found.best[0].tokens_per_s == pytest.approx(fastest, rel=1e-3)
    assert 0 < len(found.best) < len(fitting) < len(found.candidates)


def test_every_divisible_layout_is_a_candidate_once():
    found = list(
        layout_search._plans(dataclasses.replace(GUESS, layout=Layout(dp_shard=4)), sequences=4)
    )
    assert len({(p.layout, p.batch, p.recompute, p.reshard_after_forward) for p in found}) == len(
        found
    )
    assert {p.layout.ranks for p in found} == {4}
    assert {p.layout.tp for p in found} == {1, 2}  # on one host
    assert max(p.batch * p.layout.dp for p in found) == 4
    assert {p.reshard_after_forward for p in found if p.layout.dp_shard == 1} == {True}


def test_tp_ranks_are_neighbors_on_one_host():
    def degrees(ranks):
        plan = dataclasses.replace(GUESS, layout=Layout(dp_shard=ranks), gpus_per_host=6)
        return {p.layout.tp for p in layout_search._plans(plan, sequences=None)}

    assert degrees(12) == {1, 2}  # with tp=4, ranks 4 to 7 would span two hosts
    assert degrees(4) == {1, 2, 4}


@pytest.fixture(scope="module")
def free():
    """A search in which everything fits."""
    return search(APART, sequences=2, processes=1)


@pytest.fixture(scope="module")
def tight(free):
    """A plan with room for what the fastest plan allocates, but not for what it reserves."""
    plan = with_memory(APART, free.best[0].step.reserved_bytes - 1)
    return plan, search(plan, sequences=2, processes=1)


def test_the_fastest_plans_are_predicted_in_full_until_some_fit(free, tight):
    assert [one.step is not None for one in free.best] == [True, True]
    first = free.best[0]
    assert first.tokens_per_s == first.step.tokens_per_s
    # Plans that were skipped because they gather more are tried if the fastest doesn't fit.
    _, found = tight
    assert found.reasons[layout_search._RESERVED] == 1
    assert found.best[0].step.fits and found.best[0].plan.layout == first.plan.layout
    assert found.best[0].plan.reshard_after_forward > first.plan.reshard_after_forward


def test_a_search_in_several_processes_finds_the_same_plans(tight):
    plan, alone = tight
    together = search(plan, sequences=2, processes=2)
    assert _figures(together) == _figures(alone)
    assert str(together) == str(alone)


def test_an_error_in_a_worker_process_is_raised_as_in_a_plain_call():
    with pytest.raises(ValueError, match="arithmetic_share"):
        search(APART, sequences=2, processes=2, arithmetic_share=-1.0)


# Without an `if __name__ == "__main__"`: no process imports it again.
SCRIPT = """
from vgpu.plan import Layout, Plan, search
from vgpu.plan.transformer import LLAMA
search(Plan(LLAMA["8B"], Layout(dp_shard=64)), processes=2)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_no_process_outlives_a_killed_search(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen([sys.executable, tmp_path / "script.py"]) as script:
        started = []
        while len(started) < 4:  # forkserver, resource tracker, two processes that search
            assert script.poll() is None
            started = psutil.Process(script.pid).children(recursive=True)
            time.sleep(0.05)
        script.kill()
    _, alive = psutil.wait_procs(started, 300)
    assert not alive


def test_cores_and_memory_limit_the_number_of_search_processes(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 4)
    for free_bytes, processes in ((2**40, 4), (3 * layout_search.WORKER_BYTES, 3), (0, 1)):
        free = SimpleNamespace(available=free_bytes)
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: free)
        assert layout_search.at_once() == processes


def _figures(found):
    return [
        (one.plan, one.reason, one.seconds, one.allocated_bytes, one.reserved_bytes)
        for one in found.candidates
    ]


def test_a_search_in_which_nothing_fits_says_why():
    found = search(GUESS, sequences=2, gpu=with_memory(GUESS, 10_000_000).gpu)
    assert found.best == [] and sum(found.reasons.values()) == len(found.candidates)
    assert "0 of" in str(found) and layout_search._STATE_TOO_LARGE in str(found)


OWN = (
    "--layers 4 --width 256 --heads 8 --key-value-heads 4 --feed-forward 512 --vocabulary 1024 "
    "--sequence 128 --gpus-per-host 2"
)


def test_the_command_prints_the_best_plans_and_why_others_were_ruled_out(capsys):
    command.main([*OWN.split(), "--search", "--hosts", "1", "--sequences", "2"])
    shown = capsys.readouterr().out
    assert "dp_shard 2" in shown and "not tried" in shown and layout_search._MORE_WORK in shown
    command.main(f"{OWN} --search --hosts 1 --experts 4 --ep 2 --sequences 2".split())
    assert "dp_shard 2 × ep 2" in capsys.readouterr().out
    for options, message in (
        (["--hosts", "2"], "--hosts: only used with --search"),
        (["--search", "--hosts", "0"], "--hosts must be an integer of at least 1, got 0"),
        (["--search", "--sequences", "0"], "sequences must be an integer of at least 1, got 0"),
        (
            ["--search", "--hosts", "2", "--dp-shard", "2"],
            "--dp-shard: can't be combined with --hosts",
        ),
        (
            ["--search", "--hosts", "1", "--cp", "4"],
            "2 GPUs can't be divided evenly into groups of cp = 4",
        ),
        (["--search", "--serve"], "--serve: not used with --search"),
        (["--search", "--trace", "step.json"], "--trace: only used without --search"),
        (
            ["--search", "--no-reshard-after-forward"],
            "--reshard-after-forward: only used without",
        ),
        # At most two ranks share a layer, so four hosts have different samples.
        (
            ["--search", "--hosts", "4", "--sequences", "3"],
            "no layout of 8 GPUs works with only 3 sequences per step: use at least 4",
        ),
    ):
        with pytest.raises(SystemExit):
            command.main([*OWN.split(), *options])
        assert message in capsys.readouterr().err
