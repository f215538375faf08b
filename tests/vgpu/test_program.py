"""``python -m helpers.vgpu``: what a script sees, and what it is told when it cannot run."""

import subprocess
import sys

import pytest

from helpers.vgpu.__main__ import parser
from teaching.lessons import ROOT


def run(*arguments, cwd, **environment):
    """The command in a fresh process; its return code, output and errors."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.vgpu", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_script_runs_as_python_runs_it(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch\n"
        "from beside import VALUE\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv, VALUE, torch.accelerator.device_count(), __file__)\n"
        "    print(torch.vgpu.get_device_properties(0).total_memory, torch.rand(1).item())\n"
        "    sys.exit(3)\n"
    )
    options = ("--count", 3, "--memory", "1.5GiB", "--seed", 5)
    code, out, _ = run(*options, "script.py", "--epochs", "2", cwd=tmp_path)
    assert code == 3
    first, second = out.splitlines()
    assert first == "['script.py', '--epochs', '2'] 7 3 script.py"
    total, drawn = second.split()
    assert int(total) == 3 * 2**29
    _, again, _ = run(*options, "script.py", cwd=tmp_path)
    assert again.splitlines()[1].split()[1] == drawn, "the seed decides"


def test_a_script_for_cuda_runs_unchanged_and_is_told_what_was_read(tmp_path):
    (tmp_path / "beside.py").write_text("import torch\nDEVICE = torch.device('cuda', 1)\n")
    (tmp_path / "script.py").write_text(
        "import argparse, torch\n"
        "from torch.cuda.amp import GradScaler\n"
        "from beside import DEVICE\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--device', choices=['cuda', 'cpu'])\n"
        "chosen = parser.parse_args().device\n"
        "assert torch.cuda.is_available() and torch.backends.cuda.is_built() in (True, False)\n"
        "x = torch.ones(2).cuda()\n"
        "y = torch.ones(2, device=f'cuda:{0}').to(chosen)\n"
        "print(x.device, y.is_cuda, DEVICE, x.device.type == 'cuda')\n"
        "print('the word cuda in a sentence stays')\n"
    )
    code, out, error = run("--cuda-is-vgpu", "script.py", "--device", "cuda", cwd=tmp_path)
    assert code == 0, error
    assert out.splitlines() == ["vgpu:0 True vgpu:1 True", "the word cuda in a sentence stays"]
    assert "script.py: reads cuda as vgpu in lines 2, 5, 7, 8, 9, 10" in error
    assert "beside.py: reads cuda as vgpu in line 2" in error


def test_a_traceback_shows_the_line_as_it_stands(tmp_path):
    (tmp_path / "script.py").write_text("import torch\n\ntorch.ones(2, device='cuda:7')\n")
    code, _, error = run("--cuda-is-vgpu", "script.py", cwd=tmp_path)
    assert code == 1
    assert "line 3, in <module>\n    torch.ones(2, device='cuda:7')" in error
    assert "vgpu:7 was asked for; 2 virtual GPUs" in error


SPAWNING = """
import torch, torch.multiprocessing as mp

def work(rank, results):
    results[rank] = torch.ones(3, device=f"cuda:{rank}").sum().item() + torch.cuda.device_count()

if __name__ == "__main__":
    results = torch.zeros(2).share_memory_()
    mp.spawn(work, (results,), nprocs=2)
    print(results.tolist())
"""


def test_processes_that_a_script_starts_have_its_virtual_gpus(tmp_path):
    (tmp_path / "script.py").write_text(SPAWNING)
    code, out, error = run("--cuda-is-vgpu", "--summary", "script.py", cwd=tmp_path)
    assert code == 0, error
    assert out.strip() == "[5.0, 5.0]"
    assert "vgpu:1 (Virtual Tesla V100-SXM2-16GB): at most 1 KiB of 16 GiB allocated" in error


def test_a_module_runs_as_python_m_does(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys, torch\nprint(__name__, sys.argv[1:], torch.ones(1).cuda().device)\n"
    )
    code, out, error = run("--cuda-is-vgpu", "-m", "package", "a", "--b", cwd=tmp_path)
    assert code == 0, error
    assert out.strip() == "__main__ ['a', '--b'] vgpu:0"


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ("", "name a script to run, or a module with -m"),
        ("nowhere.py", "there is no script 'nowhere.py' in"),
        ("--count 0 x.py", "expected a number of GPUs from 1 to 127, found '0'"),
        ("--memory much x.py", "expected a size such as 16GiB or 512MB, found 'much'"),
        ("--gpu Z9 x.py", "invalid choice: 'Z9'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments, phrase, tmp_path, capsys, monkeypatch):
    from helpers.vgpu.__main__ import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert phrase in capsys.readouterr().err


def test_the_examples_in_the_help_parse():
    commands = [
        line.split("-m helpers.vgpu ")[1].split()
        for line in parser().format_help().splitlines()
        if "-m helpers.vgpu " in line and not line.startswith("usage")
    ]
    assert len(commands) == 3
    for command in commands:
        parser().parse_args(command)


def test_under_torchrun_there_is_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("VGPU_COUNT", raising=False)
    assert parser().parse_args(["x.py"]).count == 4
