"""Plans answered by a process that has ranks ready: the same answers, and no process that stays."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time

import psutil
import pytest

from vgpu.plan import Plan
from vgpu.plan import ready as module
from vgpu.plan.few_layers import in_few_layers
from vgpu.plan.parallel import Layout
from vgpu.plan.ready import Ready, are_neighbours
from vgpu.plan.transformer import TransformerSizes

SIZES = TransformerSizes(12, 256, 4, 4, 512, 512, sequence=256)
PLAN = Plan(SIZES, Layout(shards=16), 1, 256)
SHARED = dataclasses.replace(PLAN, layout=Layout(shards=8, tensors=2))


@pytest.fixture
def ready():
    made = Ready(PLAN, [SHARED])
    yield made
    made.end()


def test_answers_are_those_of_fresh_ranks_whatever_was_asked_before(ready):
    asked = [
        dataclasses.replace(SHARED, batch=4, checkpoint="full"),
        dataclasses.replace(PLAN, batch=2, checkpoint="selective", reshard_after_forward=False),
        SHARED,
    ]
    for plan in asked:
        found, alone = ready.answer(plan), in_few_layers(plan)
        assert found.plan == plan
        assert found.seconds() == alone.seconds()
        assert found.seconds(network="Ethernet 100") == alone.seconds(network="Ethernet 100")
        assert found.bytes_by_cause == alone.bytes_by_cause
        assert found.time_by_cause == alone.time_by_cause


def test_neighbours_differ_in_one_thing():
    assert are_neighbours(PLAN, SHARED) and are_neighbours(SHARED, SHARED)
    assert are_neighbours(PLAN, dataclasses.replace(PLAN, checkpoint="full"))
    assert not are_neighbours(PLAN, dataclasses.replace(SHARED, batch=2))
    assert not are_neighbours(PLAN, dataclasses.replace(PLAN, batch=4))


def test_neighbours_are_recorded_while_nobody_asks(monkeypatch):
    recorded, said = [], []
    one, two, four, eight = (dataclasses.replace(PLAN, batch=n) for n in (1, 2, 4, 8))
    questions = iter([four])

    class Asking:
        def poll(self):
            return False

        def recv(self):
            for question in questions:
                return question
            raise EOFError

        def send(self, answer):
            said.append((answer[0], list(recorded)))

    monkeypatch.setattr(module, "on_cluster", contextlib.nullcontext)
    monkeypatch.setattr(module, "begin", lambda reader: None)
    monkeypatch.setattr(module.os, "nice", lambda by: None)
    monkeypatch.setattr(module, "ranks_of", lambda plan: [])
    monkeypatch.setattr(module, "recorded", lambda plan, ranks: recorded.append(plan))
    module._serve(Asking(), None, one, [one, two, four, eight])
    assert said == [(four, [one, two, four])]  # what batch 1 can reach came first
    assert recorded[3:] == [eight]  # and then what batch 4 can


def test_an_answer_that_nobody_took_is_not_the_next_ones(ready):
    large = dataclasses.replace(PLAN, batch=8)
    ready.begin()
    ready._asking.send(large)  # as answer() does before Ctrl+C stops it
    assert ready.answer(PLAN).plan == PLAN
    few, many = (ready.answer(plan).steps[0].allocated_bytes for plan in (PLAN, large))
    assert few < many


def test_what_it_is_not_for_is_refused(ready):
    for changes in ({"layout": Layout(shards=32)}, {"sequence": 128}, {"network": "Ethernet 100"}):
        with pytest.raises(ValueError, match="is not for the cluster and the model"):
            ready.answer(dataclasses.replace(PLAN, **changes))
    cut = Ready(dataclasses.replace(PLAN, layout=Layout(shards=12), gpus_per_host=4))
    # Of groups of 3 in hosts of 4, rank 3's is the first in two hosts.
    other = dataclasses.replace(cut._cluster, layout=Layout(replicas=4, shards=3))
    with pytest.raises(ValueError, match="the rank whose groups are the slowest must be 0"):
        cut.answer(other)
    small = dataclasses.replace(PLAN, sizes=dataclasses.replace(SIZES, layers=4))
    with pytest.raises(ValueError, match="a model of 4 layers is small enough"):
        ready.answer(small)
    assert ready._process is None  # nothing of this takes a process


def test_a_process_that_dies_is_an_error_and_the_next_one_answers(ready):
    seconds = ready.answer(PLAN).seconds()
    ready._process.kill()
    with pytest.raises(RuntimeError, match="has died"):
        ready.answer(PLAN)
    assert ready.answer(PLAN).seconds() == seconds


def test_it_ends_while_it_prepares(ready):
    ready.begin()
    pid = ready._process.pid
    ready.end()
    assert not psutil.pid_exists(pid)


# Without an `if __name__ == "__main__"`: no process imports it once more.
SCRIPT = """
import os, signal
from vgpu.plan.transformer import LLAMA
from vgpu.plan.parallel import Layout
from vgpu.plan import Plan
from vgpu.plan import ready as module
from vgpu.plan.ready import Ready
plan = Plan(LLAMA["8B"], Layout(shards=64))
ready = Ready(plan, [plan])
ready.begin()
print(ready._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_no_process_outlives_a_program_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, until_s = int(done.stdout), time.monotonic() + 300
    while is_alive(pid):
        assert time.monotonic() < until_s, f"{pid} lives on"
        time.sleep(0.05)


def is_alive(pid):
    """An orphan is a zombie until the system has taken note of its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
