"""``python -m vgpu``: what a script sees, and the errors if it can't run."""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys

import pytest
from levels import ALL

from teaching.lessons import ROOT
from vgpu.__main__ import parser

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


UNUSED = "vgpu: no virtual GPU was used: nothing was put on one\n"


def run(*arguments, cwd, typed=""):
    """Run the command and return its exit code, output and errors."""
    command = [sys.executable, "-m", "vgpu", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, input=typed, text=True, capture_output=True
    )
    return done.returncode, done.stdout, done.stderr


def test_a_script_runs_as_under_python(tmp_path):
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
    code, out, error = run(*options, "script.py", "--epochs", "2", cwd=tmp_path)
    assert (code, error) == (3, UNUSED)
    first, second = out.splitlines()
    assert first == f"['script.py', '--epochs', '2'] 7 3 {tmp_path / 'script.py'}"
    total, drawn = second.split()
    assert int(total) == 3 * 2**29
    _, again, _ = run(*options, "script.py", cwd=tmp_path)
    assert again.splitlines()[1].split()[1] == drawn, "the seed must determine the numbers"


PROBE = """
import inspect, json, os, pickle, sys

class Own:
    pass

seen = {
    "argv": sys.argv, "file": __file__, "name": __name__, "package": __package__,
    "spec": __spec__, "loader": type(__loader__).__name__, "builtins": "__builtins__" in globals(),
    "first": sys.path[0], "folder": os.getcwd(), "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(), "source": inspect.getsource(Own),
    "pickled": type(pickle.loads(pickle.dumps(Own()))) is Own,
}
print(json.dumps(seen))
"""


@pytest.mark.parametrize("name", ["./a folder/my script.py", "no_ending"])
def test_a_script_sees_the_same_environment_as_under_python(name, tmp_path):
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(PROBE)
    arguments = [name, "two words", "", "--count", "3", "--", "-m", "--seed=x"]
    plain = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, input="typed\n", check=True,
        capture_output=True, text=True, env=ENVIRONMENT,
    ).stdout  # fmt: skip
    code, virtual, error = run(*arguments, cwd=tmp_path, typed="typed\n")
    assert code == 0, error
    plain, virtual = map(json.loads, (plain, virtual))
    assert os.path.samefile(plain.pop("file"), virtual.pop("file"))
    assert plain == virtual and plain["pickled"] and plain["argv"][1:] == arguments[1:]


ENDS = {
    "a text": "import sys; sys.exit('enough')",
    "an error": (
        "def inner():\n    try:\n        1 / 0\n    except ZeroDivisionError as error:\n"
        "        raise KeyError(2) from error\n\ninner()"
    ),
    "no Python": "x = (",
    "a hook": "import sys\nsys.excepthook = lambda *found: print('hook', found[0])\n1 / 0",
    "at once": "import os; os._exit(9)",
}


@pytest.mark.parametrize(
    ("kinds", "options"),
    [(list(ENDS), ()), (["an error", "no Python"], ("--cuda-is-vgpu",))],
)
def test_a_script_ends_as_under_python(kinds, options, tmp_path):
    for kind in kinds:
        script = tmp_path / "script.py"
        script.write_text(ENDS[kind] + "\n")
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True
        )
        code, out, error = run(*options, script, cwd=tmp_path)
        unused = UNUSED if kind == "a text" else ""
        assert (code, out, error) == (done.returncode, done.stdout, unused + done.stderr), kind


def test_ctrl_c_ends_a_script_as_under_python(tmp_path):
    # A shell's background jobs start with Ctrl-C disabled, and so might this test. Python wouldn't
    # wake from a single long sleep if the signal came just before it.
    (tmp_path / "script.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('begun', flush=True)\nfor _ in range(10_000): time.sleep(0.01)\n"
    )
    ended = []
    for module in ([], ["-m", "vgpu"]):
        program = subprocess.Popen(
            [sys.executable, *module, "script.py"], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGINT)
        _, error = program.communicate()
        assert "in <module>" in error and error.rstrip().endswith("KeyboardInterrupt")
        ended.append((program.returncode, str(ROOT) in error))
    assert ended == [(-signal.SIGINT, False)] * 2


def test_a_script_for_cuda_runs_unchanged_and_prints_what_was_replaced(tmp_path):
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
        "scaler = torch.amp.GradScaler()  # for cuda, where nothing is said\n"
        "print(scaler.is_enabled(), scaler.scale(x).device, torch.GradScaler('cpu')._device)\n"
        "print('the word cuda in a sentence stays')\n"
        "torch.ones(2, device='cuda:7')\n"
    )
    code, out, error = run("--cuda-is-vgpu", "script.py", "--device", "cuda", cwd=tmp_path)
    assert code == 1, error
    assert out.splitlines() == [
        "vgpu:0 True vgpu:1 True",
        "True vgpu:0 cpu",
        "the word cuda in a sentence stays",
    ]
    assert "line 14, in <module>\n    torch.ones(2, device='cuda:7')" in error, (
        "the traceback must show the line as it was written"
    )
    assert "vgpu:7 was requested; 2 virtual GPUs" in error
    assert "script.py: reads cuda as vgpu in lines 2, 5, 7, 8, 9, 10, 14" in error
    assert "beside.py: reads cuda as vgpu in line 2" in error


SPAWNING = """
import torch, torch.multiprocessing as mp

def work(rank, results):
    for i in range(2):
        results[i] = torch.ones(3, device=f"cuda:{i}").sum().item() + torch.cuda.device_count()

if __name__ == "__main__":
    results = torch.zeros(2).share_memory_()
    mp.spawn(work, (results,), nprocs=1)  # each imports torch
    print(results.tolist())
"""


POOLING = """
import multiprocessing, sys, torch
from torch.utils.data import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(float(i) ** 2)

def total(i):
    return (torch.ones(i, device="vgpu:2").sum().item(), torch.vgpu.device_count())

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    context.set_forkserver_preload(["torch"])  # once, for the pool and the loader
    with context.Pool(1) as pool:
        print(pool.map(total, [1, 2, 3]))
    loader = DataLoader(Squares(), 2, num_workers=1, multiprocessing_context=context)
    print([batch.to("vgpu:1").tolist() for batch in loader])
"""


METHODS = multiprocessing.get_all_start_methods()


# The next test also covers spawned processes.
@pytest.mark.parametrize(
    "method", METHODS if ALL else [m for m in METHODS if m != "spawn"] or METHODS
)
def test_every_way_of_starting_processes_keeps_the_virtual_gpus(method, tmp_path):
    (tmp_path / "script.py").write_text(POOLING)
    code, out, error = run("--count", 3, "script.py", method, cwd=tmp_path)
    assert code == 0, error
    assert out.splitlines() == ["[(1.0, 3), (2.0, 3), (3.0, 3)]", "[[0.0, 1.0], [4.0, 9.0]]"]


def test_processes_that_a_script_starts_have_its_virtual_gpus(tmp_path):
    (tmp_path / "script.py").write_text(SPAWNING)
    code, out, error = run("--cuda-is-vgpu", "--summary", "script.py", cwd=tmp_path)
    assert code == 0, error
    assert out.strip() == "[5.0, 5.0]"
    assert "vgpu:1 (Virtual Tesla V100-SXM2-16GB): at most 1 KiB of 16 GiB allocated" in error


def test_a_module_runs_as_under_python_m(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys, torch\nprint(__name__, sys.argv[1:], torch.ones(1).cuda().device)\n"
    )
    code, out, error = run("--cuda-is-vgpu", "-m", "package", "a", "--b", cwd=tmp_path)
    assert code == 0, error
    assert out.strip() == "__main__ ['a', '--b'] vgpu:0"


def test_tests_for_cuda_run_under_pytest(tmp_path):
    (tmp_path / "test_gpu.py").write_text(
        "import pytest, torch\n"
        "@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs CUDA')\n"
        "def test_is_on_the_gpu():\n    assert torch.ones(1).cuda().is_cuda\n"
    )
    arguments = "--cuda-is-vgpu", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_gpu.py"
    code, out, error = run(*arguments, cwd=tmp_path)
    assert code == 0 and "1 passed" in out, out + error


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ("", "name a script to run, a module with -m, or a command with -c"),
        ("nowhere.py", "there is no script 'nowhere.py' in"),
        ("--count 0 x.py", "expected a number of GPUs from 1 to 127, got '0'"),
        ("--memory much x.py", "expected a size such as 16GiB or 512MB, got 'much'"),
        ("--gpu Z9 x.py", "invalid choice: 'Z9'"),
        ("--memory 0 x.py", "expected at least one byte, got '0'"),
        ("--seed one x.py", "expected an integer from 0 to 2**63 - 1, got 'one'"),
        (f"--seed {2**63} x.py", "expected an integer from 0 to 2**63 - 1"),
        ("--read nosuch -c pass", "names 'nosuch', but there is no such package"),
        ("--cound 3 x.py", "unrecognized arguments: --cound"),
        ("--", "name a script to run, a module with -m, or a command with -c"),
        ("-m", "name a script to run, a module with -m, or a command with -c"),
        (".", "'.' is a folder: name a script in it, or a module or package with -m"),
    ],
)
def test_the_command_rejects_bad_input_with_a_clear_message(
    arguments, phrase, tmp_path, capsys, monkeypatch
):
    from vgpu.__main__ import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert phrase in capsys.readouterr().err


def test_the_error_for_a_bad_vgpu_count_names_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("VGPU_COUNT", "many")
    with pytest.raises(SystemExit):
        parser().parse_args(["x.py"])
    assert "got 'many' in the environment variable VGPU_COUNT" in capsys.readouterr().err
    assert parser().parse_args(["--count", "3", "x.py"]).count == 3


PACKAGE = """
import torch
from torch.cuda import CUDAGraph
device = "cuda" if torch.cuda.is_available() else "cpu"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that chooses a device."""
    folder = tmp_path / "site-packages" / "chooser"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join([str(ROOT), str(folder.parent)]))
    (tmp_path / "train.py").write_text(
        "import chooser, torch\nprint(torch.ones(1).to(chooser.device).device)\n"
    )


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ((), "add --cuda-is-vgpu"),
        (("--cuda-is-vgpu", "--not-read", "chooser"), "add --read chooser"),
    ],
)
def test_a_run_that_stayed_on_the_cpu_names_the_package_that_chose_it(
    options, advice, package, tmp_path
):
    _, out, error = run(*options, "train.py", cwd=tmp_path)
    assert out == "cpu\n"
    assert error == (
        "vgpu: no virtual GPU was used: chooser asked for CUDA and found none; "
        f"{advice} to let it find the virtual GPUs\n"
    )


def test_every_python_process_that_a_run_starts_has_its_virtual_gpus(package, tmp_path):
    """Start processes as launchers do; the run knows that they used GPUs, even if it used none itself."""
    (tmp_path / "launcher.py").write_text(
        "import subprocess, sys\n"
        "for program in (['train.py'], ['-m', 'train'], ['-c', 'import train']):\n"
        "    subprocess.run([sys.executable, '-u', *program], check=True)\n"
    )
    code, out, error = run("--cuda-is-vgpu", "launcher.py", cwd=tmp_path)
    assert (code, out) == (0, "vgpu:0\n" * 3), error
    assert error == "vgpu: reads cuda as vgpu in packages: chooser (files: 1)\n"


def test_a_command_runs_as_under_python_c(tmp_path):
    command = "import sys, torch; print(sys.argv, torch.ones(1, device='cuda').device)"
    code, out, error = run("--cuda-is-vgpu", "-c", command, "--x", cwd=tmp_path)
    assert (code, out) == (0, "['-c', '--x'] vgpu:0\n"), error


@pytest.mark.parametrize(
    ("command", "flags", "program"),
    [
        ("python -u train.py -m x", ["-u"], ["train.py", "-m", "x"]),
        ("python -W ignore -Xdev -m a.b c", ["-W", "ignore", "-Xdev"], ["-m", "a.b", "c"]),
        ("python -um a --b", ["-u"], ["-m", "a", "--b"]),
        ("python -cpass", [], ["-c", "pass"]),
        (
            "python --check-hash-based-pycs never a.py",
            ["--check-hash-based-pycs", "never"],
            ["a.py"],
        ),
        ("python -i", ["-i"], []),
        ("python - a", [], []),
    ],
)
def test_pythons_own_options_are_separated_from_the_program_and_its_arguments(
    command, flags, program
):
    path = ROOT / "vgpu" / "for_children" / "sitecustomize.py"
    assert runpy.run_path(path)["split"](command.split()) == (flags, program)


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (["train.py"], True),
        (["-m", "torch.distributed.run"], True),
        (["-c", "import train"], True),
        (["-c", "import gc; from multiprocessing.forkserver import main; main()"], False),
        (["-c", "import sys;exec(eval(sys.stdin.readline()))"], False),
        (["-m", "vgpu", "train.py"], False),
        (["-m", "vgpu.plan"], False),
        (["/lib/torch/_inductor/compile_worker/__main__.py"], False),
    ],
)
def test_processes_that_run_no_user_program_are_left_alone(program, wanted):
    path = ROOT / "vgpu" / "for_children" / "sitecustomize.py"
    assert runpy.run_path(path)["is_wanted"](program) == wanted


def test_the_error_for_a_missing_module_names_it_in_one_line(tmp_path):
    code, _, error = run("-m", "nosuch", cwd=tmp_path)
    assert (code, error) == (1, "ModuleNotFoundError: No module named 'nosuch'\n")


def test_a_script_next_to_a_module_named_vgpu_gets_a_warning(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "vgpu.py").write_text("VALUE = 1\n")
    (folder / "script.py").write_text("print('ran')\n")
    code, out, error = run("project/script.py", cwd=tmp_path)
    assert (code, out) == (0, "ran\n")
    assert "project/vgpu.py can't be imported here" in error and "rename it" in error


def test_the_examples_in_the_help_parse():
    commands = [
        line.split("-m vgpu ")[1].split()
        for line in parser().format_help().splitlines()
        if "-m vgpu " in line and "[options]" not in line
    ]
    assert len(commands) == 4
    for command in commands:
        parser().parse_args(command)


def test_under_torchrun_each_rank_has_a_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("VGPU_COUNT", raising=False)
    assert parser().parse_args(["x.py"]).count == 4
