"""Lesson 07's script under torchrun on two hosts: one is lost and comes back, and training resumes.

The hosts are two agents on this machine. At the end, the parameters must match those from a single
uninterrupted process.
"""

import inspect
import linecache
import os
import re
import signal
import subprocess
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist

import vgpu
from helpers.data import Digits
from teaching import lessons
from vgpu.launch.launcher import free_port, loopback

LESSON = next(path for path in lessons.NOTEBOOKS if lessons.number(path) == "07")
LOST_IN_EPOCH = 2
TIME_S = 800  # usually seconds are enough, but a busy machine imports torch slowly


@pytest.fixture(scope="module")
def lesson():
    """The names that the lesson's cells define, including the script's functions."""
    names = {"__name__": "__main__"}
    cells = lessons.cells(LESSON)
    for cell in [c for c in cells if c.is_code and {"setup", "script"} & set(c.tags)]:
        # The lesson reads the source of its own functions.
        name = f"<{cell.id}>"
        linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(True), name)
        exec(compile(cell.source, name, "exec"), names)
    return names


@pytest.fixture(scope="module")
def expected(lesson, tmp_path_factory):
    """The parameters after a single process has done the full training run."""
    folder = with_digits(tmp_path_factory.mktemp("single"))
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=0, world_size=1)
    with vgpu.enable(1), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        torch.set_num_threads(1)
        lesson["train"](0, 1, folder)
    torch.set_num_threads(threads)
    dist.destroy_process_group()
    return torch.load(folder / "checkpoint.pt", map_location="cpu")["model"]


def with_digits(folder):
    for part in ("train", "test"):
        digits = Digits(train=part == "train")
        # 15 steps per epoch are as good as 29 here.
        images, labels = digits.data[:720, None].double() / 255, digits.targets[:720]
        torch.save((images, labels), folder / f"{part}.pt")
    return folder


def test_training_resumes_after_a_host_is_lost(lesson, expected, tmp_path):
    script = tmp_path / "train_ddp.py"
    script.write_text(lesson["script"], encoding="utf-8")
    folder = with_digits(tmp_path)
    statuses = train_on_two_hosts(script, folder, {"POWER_CUT_IN_EPOCH": str(LOST_IN_EPOCH)})
    said = (folder / "said.txt").read_text(encoding="utf-8")
    # Host 1 is killed; host 0 notices, and neither waits forever.
    assert statuses[1] == -signal.SIGKILL and statuses[0] not in (0, -signal.SIGKILL), said
    assert history_in(folder) == [2] * LOST_IN_EPOCH

    # The host is back, and the same command is run again on both.
    statuses = train_on_two_hosts(script, folder, {})
    said = (folder / "said.txt").read_text(encoding="utf-8")
    assert statuses == [0, 0], said
    epochs = inspect.signature(lesson["train"]).parameters["epochs"].default
    assert history_in(folder) == [2] * epochs
    trained = [int(epoch) for epoch in re.findall(r"^epoch (\d+)", said, re.M)]
    assert trained == list(range(epochs)), "an epoch was trained twice or never"
    after = torch.load(folder / "checkpoint.pt", map_location="cpu")
    torch.testing.assert_close(after["model"], expected)


def train_on_two_hosts(script, folder, environment_of_host_1):
    """Start two agents, wait for both, and return their exit statuses (None after ``TIME_S``)."""
    # With GPUs visible, both hosts would use GPU 0.
    shared = {"GLOO_SOCKET_IFNAME": loopback(), "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    arguments += [f"--master-port={free_port()}", f"--log-dir={folder / 'logs'}"]
    agents = []
    try:
        for number, own in enumerate(({}, environment_of_host_1)):
            agents.append(
                programs.start(
                    "torch.distributed.run", *arguments, f"--node-rank={number}",
                    "-m", "vgpu", script, folder, output=folder / "said.txt", **shared, **own,
                )
            )  # fmt: skip
        return [status_of(agent) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # also terminates its ranks; does nothing if it has exited
            if status_of(agent) is None:
                agent.kill()
                agent.wait()


def status_of(agent):
    try:
        return agent.wait(TIME_S)
    except subprocess.TimeoutExpired:
        return None


def history_in(folder):
    """Return, for each epoch in the checkpoint, the number of ranks that trained it."""
    saved = torch.load(folder / "checkpoint.pt", map_location="cpu")
    return [ranks for ranks, _ in saved["history"]]


def test_the_script_consists_of_the_lessons_own_functions(lesson):
    for name in ("train", "train_epoch", "save", "resume", "batches", "power_cut"):
        assert f"def {name}(" in lesson["script"]
    compile(lesson["script"], "train_ddp.py", "exec")


def test_the_folder_is_left_with_one_complete_checkpoint(lesson, tmp_path):
    """An interrupted save leaves the previous checkpoint."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lesson["save"](tmp_path, model, optimizer, ["before"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda state, path: Path(path).write_bytes(b"half"))
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lesson["save"](tmp_path, model, optimizer, ["after"])
    assert lesson["resume"](tmp_path, model, optimizer) == ["before"]


def interrupted(*_):
    raise KeyboardInterrupt
