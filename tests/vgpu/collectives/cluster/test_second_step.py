"""``python -m vgpu --cluster``: a script as rank 0 of a cluster, until its second training step."""

import os
import subprocess
import sys

import pytest

from teaching.lessons import ROOT
from vgpu.__main__ import parser

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
model = torch.nn.Linear(4096, 4096, device="vgpu")
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
for step in range({steps}):
    loss = model(torch.ones(512, 4096, device="vgpu")).sum()
    loss.backward()
    {read}
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, "of rank", dist.get_rank(), "of", dist.get_world_size())
"""


@pytest.fixture
def run(tmp_path):
    def run(*options, steps=9, read="pass"):
        (tmp_path / "script.py").write_text(SCRIPT.format(steps=steps, read=read))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "vgpu", *options, "script.py"],
            cwd=tmp_path, env=environment, text=True, capture_output=True,
        )  # fmt: skip

    return run


def test_the_cluster_option_predicts_the_scripts_second_step_and_stops(run):
    exposed = []
    for network in ("InfiniBand NDR", "Ethernet 100"):
        done = run("--cluster", "2x8", "--gpu", "H100", "--network", network)
        assert (done.returncode, done.stderr) == (0, "")
        first, cluster, step, *shares, peak = done.stdout.splitlines()
        assert first == "step 0 of rank 0 of 16"
        assert cluster.startswith("rank 0 of 16: 2 hosts with 8 H100")
        assert step.startswith("a step takes ") and step.endswith(" of virtual time")
        assert sum(float(line.split("%")[0]) for line in shares) == pytest.approx(100, abs=0.2)
        assert peak.endswith("of 80 GiB allocated")
        (line,) = (line for line in shares if "exposed" in line)
        exposed.append(float(line.split("%")[0]))
    assert 0 < exposed[0] < exposed[1], (
        "exposed collectives must take up more of the step on a slower network"
    )


def test_a_script_with_one_step_is_told_that_two_are_needed(run):
    done = run("--cluster", "1x2", steps=1)
    assert done.returncode == 1
    assert "this records the second optimizer step, but the program took only 1" in done.stderr


def test_a_script_that_reads_a_tensors_value_gets_an_error(run):
    done = run("--cluster", "1x2", read="loss.item()")
    assert done.returncode == 1
    assert "item() needs the values of a tensor" in done.stderr


@pytest.mark.parametrize("text", ["8", "0x8", "8x", "2x500", "axb"])
def test_the_cluster_option_rejects_invalid_clusters(capsys, text):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["--cluster", text, "script.py"])
    assert stopped.value.code == 2
    expected = f"expected hosts x GPUs per host, up to 127, as in 8x8; got '{text}'"
    assert expected in capsys.readouterr().err
