"""The script of lesson 07 under torchrun on two hosts: one is lost, comes back, training resumes.

Two hosts are two network namespaces joined by a cable (a veth pair) where this machine lets us
make them; besides, two agents on this machine play them, everywhere. At the end the parameters
must be those of one process that nobody disturbed.
"""

import linecache
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.data import Digits
from teaching import lessons

LESSON = next(path for path in lessons.NOTEBOOKS if lessons.number(path) == "07")
EPOCHS, LOST_IN_EPOCH = 8, 3
TIME_S = 240  # for anything that should take seconds; a busy machine is slow to import torch


@dataclass
class Host:
    """One host: its address, the network interface that has it, and how to run something there."""

    address: str
    interface: str
    prefix: list[str] = field(default_factory=list)

    def start(self, number, script, folder, meeting_point, **environment):
        """The agent of this host, with one rank; what it says goes to a file in the folder."""
        address, port = meeting_point
        command = [
            *self.prefix,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}"),
            f"--log-dir={folder / 'logs'}",
            *(str(script), str(folder)),
        ]
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # both hosts would take GPU 0
        with open(folder / "said.txt", "a", encoding="utf-8") as said:
            return subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=said, stderr=subprocess.STDOUT
            )


@pytest.fixture(scope="module")
def lesson():
    """The names that the lesson's cells make: the script, and its functions."""
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
    """The parameters after one process has done the whole training by itself."""
    folder = with_digits(tmp_path_factory.mktemp("single"))
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lesson, "my_device", lambda: torch.device("cpu"))
        torch.set_num_threads(1)
        lesson["train"](0, 1, folder, EPOCHS)
    torch.set_num_threads(threads)
    dist.destroy_process_group()
    return torch.load(folder / "checkpoint.pt", map_location="cpu")["model"]


def with_digits(folder):
    for part in ("train", "test"):
        digits = Digits(train=part == "train")
        torch.save((digits.data[:, None].double() / 255, digits.targets), folder / f"{part}.pt")
    return folder


def free_port():
    """A port of this machine that is free now; a fresh namespace has them all free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def two_agents():
    """Both hosts are this machine: two agents that talk over its loopback."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    yield [Host("127.0.0.1", loopback), Host("127.0.0.1", loopback)]


@contextmanager
def two_namespaces():
    """Two hosts with a network of their own each, and one cable between them."""
    if sys.platform != "linux":
        pytest.skip("two hosts are made from network namespaces, which only Linux has")
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    if shutil.which("ip") is None:
        pytest.skip("making a network namespace needs the command ip (package iproute2)")
    names = [f"lesson07-{os.getpid()}-{index}" for index in (0, 1)]
    ends = [f"v{os.getpid()}-{index}" for index in (0, 1)]
    hosts = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth",
           "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            address = f"10.77.0.{index + 1}"
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(address, end, ["ip", "netns", "exec", name]))
        yield hosts
    finally:
        # The cable goes with them.
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this machine refuses `ip {' '.join(arguments)}`: {done.stderr.strip()}")


@pytest.mark.timeout(3 * TIME_S)
@pytest.mark.parametrize("make_hosts", [two_agents, two_namespaces])
def test_a_host_is_lost_and_the_training_resumes(lesson, expected, tmp_path, make_hosts):
    script = tmp_path / "train_ddp.py"
    script.write_text(lesson["script"], encoding="utf-8")
    folder = with_digits(tmp_path)
    with make_hosts() as hosts:
        lose_host_1 = {"POWER_CUT_IN_EPOCH": str(LOST_IN_EPOCH)}
        statuses = train_on(hosts, script, folder, lose_host_1)
        said = (folder / "said.txt").read_text(encoding="utf-8")
        # Host 1 is killed; host 0 notices, and neither waits for ever.
        assert statuses[1] == -signal.SIGKILL and statuses[0] not in (0, -signal.SIGKILL), said
        assert history_in(folder) == [2] * LOST_IN_EPOCH

        # The host is back, and the same command is given once more on both.
        statuses = train_on(hosts, script, folder)
        said = (folder / "said.txt").read_text(encoding="utf-8")
        assert statuses == [0, 0], said
        if hosts[0].prefix:
            assert_gradients_crossed(hosts[0], expected)
    assert history_in(folder) == [2] * EPOCHS
    trained = [int(epoch) for epoch in re.findall(r"^epoch (\d+)", said, re.M)]
    assert trained == list(range(EPOCHS)), "an epoch was trained twice or never"
    after = torch.load(folder / "checkpoint.pt", map_location="cpu")
    torch.testing.assert_close(after["model"], expected)


def train_on(hosts, script, folder, environment_of_host_1=None):
    """Start an agent on each host and wait for both: their exit statuses."""
    meeting_point = hosts[0].address, free_port()
    agents = []
    try:
        for number, environment in enumerate(({}, environment_of_host_1 or {})):
            agents.append(hosts[number].start(number, script, folder, meeting_point, **environment))
        return [agent.wait(TIME_S) for agent in agents]
    finally:
        for agent in agents:
            stop(agent)


def history_in(folder):
    """For each epoch in the checkpoint, the number of ranks that trained it."""
    saved = torch.load(folder / "checkpoint.pt", map_location="cpu")
    return [ranks for ranks, _ in saved["history"]]


def assert_gradients_crossed(host, parameters):
    """What host 0 received over the cable is at least a gradient for every step of an epoch."""
    counter = f"/sys/class/net/{host.interface}/statistics/rx_bytes"
    read = [*host.prefix, "cat", counter]
    received_bytes = int(subprocess.run(read, capture_output=True, text=True, check=True).stdout)
    gradient_bytes = sum(tensor.nbytes for tensor in parameters.values())
    assert received_bytes > 40 * gradient_bytes


def stop(agent):
    """End an agent, which ends its ranks; nothing happens to one that has ended."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(60)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def test_the_script_is_the_lesson_s_own_functions(lesson):
    for name in ("train", "train_epoch", "save", "resume", "batches", "power_cut"):
        assert f"def {name}(" in lesson["script"]
    compile(lesson["script"], "train_ddp.py", "exec")


def test_the_folder_is_left_with_one_whole_checkpoint(lesson, tmp_path):
    """A save that is cut off midway leaves the checkpoint of before."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lesson["save"](tmp_path, model, optimizer, ["before"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda state, path: Path(path).write_bytes(b"half"))
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lesson["save"](tmp_path, model, optimizer, ["after"])
    assert lesson["resume"](tmp_path, model, optimizer, "cpu") == ["before"]


def interrupted(*_):
    raise KeyboardInterrupt
