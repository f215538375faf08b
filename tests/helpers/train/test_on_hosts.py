"""helpers.train on two hosts: one is lost and the other goes on; the lesson's own commands run."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import programs
import psutil
import pytest
import torch
from hosts import TIME_S, status_of, stop, two_agents, two_namespaces
from levels import ALL, sample
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers.train import Settings, Training
from teaching import lessons
from vgpu import launch
from vgpu.launch.launcher import free_port

LESSON = next(path for path in lessons.NOTEBOOKS if lessons.number(path) == "07")

COMMANDS = sample(["slurm", "two-real-hosts"], 1)

# How soon a silent host counts as gone, and how long to wait for one that may still come.
PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=4"


@pytest.mark.skipif(not ALL, reason="one host lost: lesson 07; for good: TESTS=all")
@pytest.mark.parametrize("make_hosts", [two_agents, two_namespaces])
def test_the_host_that_is_left_goes_on_by_itself(tmp_path, make_hosts):
    run = tmp_path / "run"
    training = ["-m", "helpers.train", "--cpu", "--width=4", "--threads=1"]
    training += ["--epochs=4", "--save-every=10"]
    with make_hosts() as hosts:
        port = free_port()
        elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=lost"]
        elastic += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{port}"]
        agents = []
        try:
            # The one that others meet at comes last: it finds the other there and waits for none.
            for number, host in reversed([*enumerate(hosts)]):
                # Inside a namespace a host does not know that the address is its own.
                conf = f"--rdzv-conf=is_host={number == 0},{PATIENCE}"
                arguments = [*elastic, conf, f"--local-addr={host.address}", *training]
                said = tmp_path / f"said-{number}.txt"
                agents.append(host.start([*arguments, f"--checkpoints={run}"], said))
            lost, left = agents
            wait_until(lambda: any(run.glob("step-*")) or left.poll() is not None)
            for process in [*psutil.Process(lost.pid).children(recursive=True), lost]:
                process.kill()
            status = status_of(left)
        finally:
            for agent in agents:
                stop(agent)
    of_lost, said = ((tmp_path / f"said-{i}.txt").read_text(encoding="utf-8") for i in (1, 0))
    assert status == 0, said
    began, _, went_on = said.partition("1 rank on CPU")
    began += of_lost  # either host may have had rank 0
    assert "2 ranks on CPU" in began and "resumed from" not in began, said
    assert f"resumed from {run}" in went_on, said
    assert (run / "step-00000176" / "run.json").read_text().count('"ranks": 1') == 1

    dcp_to_torch_save(run / "step-00000176", tmp_path / "plain.pt")
    [expected] = launch.run(undisturbed, 1, Settings(width=4, epochs=4))
    torch.testing.assert_close(torch.load(tmp_path / "plain.pt")["model"], dict(expected))


def undisturbed(rank, world_size, settings):
    torch.set_num_threads(1)
    training = Training(settings, cpu=True)
    for images, labels in training.batches():
        training.train_on(images, labels)
    return training.model.module.state_dict()


def wait_until(condition):
    end_s = time.monotonic() + TIME_S
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("cell_id", COMMANDS)
def test_the_commands_for_your_own_hosts_run(tmp_path, cell_id):
    """As they stand in the lesson, with stand-ins for ssh and Slurm that stay on this machine."""
    (cell,) = [cell for cell in lessons.cells(LESSON) if cell.id == cell_id]
    (text,) = re.findall(r"```bash\n(.*?)```", cell.source, re.DOTALL)
    port = free_port()
    for old, new in {
        "HOST0 HOST1": "first second",
        "HOST0:29500": f"localhost:{port}",
        "20000 + SLURM_JOB_ID % 10000": str(port),
        "--nproc-per-node=2": "--nproc-per-node=1",
        "FOLDER": f"{tmp_path / 'run'} --cpu --epochs=1 --threads=1 --width=4 --batch-size=240",
    }.items():
        text = text.replace(old, new)
    stand_ins = {
        "ssh": 'shift; exec "$@"',
        "scontrol": "echo localhost",
        "srun": '"$@" & "$@" & wait',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(
        ["bash", "-eu", "-c", text],
        env={**programs.environment(), **slurm, "SLURM_CPUS_PER_TASK": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIME_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 ranks on CPU"), done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["step-00000005"]
