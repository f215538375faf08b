"""``pytest --vgpus 4``: a project's CUDA tests, in a separate pytest."""

import os
import subprocess
import sys

import pytest

from teaching.lessons import ROOT

TESTS = """
import subprocess, sys, unittest
import pytest, torch
from torch import multiprocessing

CHILD = "import torch; print(torch.ones(1, device='cuda:2').device)"

def total(rank, results):
    results[rank] = torch.ones(3, device=f"cuda:{rank}").sum().item()

@unittest.skipIf(not torch.cuda.is_available(), "CUDA not available")
class TestOnGPUs(unittest.TestCase):
    def test_cuda_is_available(self):
        assert torch.ones(1).cuda().is_cuda and torch.cuda.device_count() == 3

def test_spawned_processes_have_the_gpus():
    results = torch.zeros(2).share_memory_()
    multiprocessing.spawn(total, (results,), nprocs=2)
    assert results.tolist() == [3, 3]

def test_other_pythons_have_the_gpus():
    assert "vgpu:2" in subprocess.check_output([sys.executable, "-c", CHILD], text=True)

@pytest.mark.vgpus(6, gpu="H100")
def test_a_marked_test_has_its_own_gpus():
    assert torch.cuda.device_count() == 6 and "H100" in torch.cuda.get_device_name()

def test_a_failed_assertion_shows_its_values():
    count = torch.cuda.device_count()
    assert count == 7
"""


def run(*arguments, cwd, plugin=True):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTEST_PLUGINS"] = "pytest_vgpu" if plugin else ""
    (cwd / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True)


@pytest.mark.parametrize(
    ("beside", "passed"), [((), 4), (("-n", "2", "-k", "not processes and not pythons"), 2)]
)
def test_a_projects_cuda_tests_run_on_virtual_gpus(beside, passed, tmp_path):
    (tmp_path / "test_gpu.py").write_text(TESTS)
    done = run("--vgpus", "3", *beside, cwd=tmp_path)
    assert f"1 failed, {passed} passed" in done.stdout, done.stdout + done.stderr
    assert "assert 3 == 7" in done.stdout, "pytest must explain failed asserts"
    assert "vgpu: ran on 3 x Virtual Tesla V100-SXM2-16GB" in done.stdout


def test_a_run_that_used_no_gpu_says_so(tmp_path):
    (tmp_path / "test_cpu.py").write_text("def test_nothing(): pass\n")
    done = run("--vgpus", "2", "--vgpu-model", "H100", cwd=tmp_path)
    assert "1 passed" in done.stdout and "vgpu: no virtual GPU was used" in done.stdout, done.stdout


def test_the_plugin_imports_torch_only_when_used(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import sys\ndef test_x(): assert 'torch' not in sys.modules and 'vgpu' not in sys.modules\n"
    )
    done = run(cwd=tmp_path)
    assert done.returncode == 0 and "vgpu" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--vgpus", "2", "--vgpu-model", "Z9"], "no GPU preset 'Z9': use one of K80, "),
        (["--vgpus", "0"], "count must be from 1 to 127"),
        (["--vgpu-model", "H100"], "--vgpu-model needs --vgpus"),
    ],
)
def test_bad_options_are_rejected_with_a_clear_message(arguments, phrase, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 4 and phrase in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
