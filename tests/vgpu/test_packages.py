"""Training packages, as installed: where their tensors are, and their results.

Each runs a program of tests/foreign, whose last line of output is JSON.
"""

import json
import os
import subprocess
import sys

import pytest

from teaching.lessons import ROOT

PROGRAMS = ROOT / "tests" / "foreign"
RUN = ["-m", "vgpu", "--cuda-is-vgpu", "--count"]
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments, folder):
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "no virtual GPU was used" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_transformers_trainer_trains_on_virtual_gpus_as_on_the_cpu(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    program = PROGRAMS / "trainer.py", tmp_path
    on_cpu = run(*RANKS, *program, "cpu", folder=tmp_path)
    assert on_cpu["devices"] == ["cpu"]
    parallel = run(*RUN, 2, *program, folder=tmp_path)
    ddp = run(*RUN, 2, *RANKS, *program, folder=tmp_path)
    assert (parallel["n_gpu"], ddp["n_gpu"]) == (2, 1), "DataParallel, and a rank of DDP"
    assert parallel["devices"] == ddp["devices"] == ["vgpu:0"]
    for found in (parallel, ddp):
        assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-5)


def test_a_device_map_spreads_a_model_over_virtual_gpus(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    devices = run(*RUN, 3, PROGRAMS / "device_map.py", tmp_path / "model", folder=tmp_path)
    assert devices == ["vgpu:0", "vgpu:1", "vgpu:2"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lightning_trains_on_virtual_gpus_as_on_the_cpu(strategy, tmp_path):
    pytest.importorskip("lightning")
    program = PROGRAMS / "lightning_fit.py"
    on_cpu = run(program, "ddp", "cpu", folder=tmp_path)
    found = run(*RUN, 2, program, strategy, "cuda", folder=tmp_path)
    assert (found["devices"], on_cpu["devices"]) == (["vgpu:0"], ["cpu"])
    assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-5)


def test_accelerates_own_test_script_passes_on_virtual_gpus(tmp_path):
    scripts = os.path.dirname(pytest.importorskip("accelerate.test_utils.scripts").__file__)
    command = [*RUN, "2", "--summary", *RANKS, os.path.join(scripts, "test_script.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: vgpu:{rank} (Virtual Tesla V100-SXM2-16GB): at most" in done.stderr
