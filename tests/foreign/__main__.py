"""``make test-foreign``: programs and suites that others wrote, on virtual GPUs.

Runs what is installed, or what a folder has, and writes the table of docs/foreign.md. Nothing is
downloaded.

    python tests/foreign                          all suites of packages that are installed
    python tests/foreign accelerate lightning     these
    python tests/foreign path/to/tests            the tests of a folder or file, by pytest
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "foreign.md"
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
REFUSED = re.compile(r"NotImplementedError: (.+)")
TIME_LIMIT_S = 900


@dataclass
class Result:
    """What became of the programs of a suite: each counts once."""

    passed: int = 0
    refused: int = 0
    """Ended by NotImplementedError: a sentence of the library, or of the package itself."""
    failed: int = 0
    wrong: int = 0
    """Ran, with another number than on the CPU."""
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        numbers = (self.passed, self.refused, self.failed, self.wrong, self.skipped)
        notes = "; ".join(dict.fromkeys(self.notes)).replace("|", "/")
        return f"| {name} | {' | '.join(map(str, numbers))} | {notes} |"


def run(*arguments: object, gpus: int = 0) -> subprocess.CompletedProcess[str]:
    """A Python program in a folder of its own, on so many virtual GPUs; none: as it is."""
    command = [
        sys.executable,
        *(["-m", "vgpu", "--cuda-is-vgpu", f"--count={gpus}"] if gpus else []),
    ]
    command += map(str, arguments)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            return subprocess.run(
                command, cwd=folder, env=environment, text=True, capture_output=True,
                timeout=TIME_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"longer than {TIME_LIMIT_S} s")


def judge(result: Result, name: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Count a program; True where it passed, so that its numbers can be compared."""
    if done.returncode == 0 and "no virtual GPU was used" not in done.stderr:
        result.passed += 1
        return True
    if done.returncode and (found := REFUSED.findall(done.stderr)):
        result.refused += 1
        result.notes.append(f"{name}: {found[-1][:120]}")
        return False
    result.failed += 1
    errors = re.findall(r"\w*Error: .+|longer than .+|no virtual GPU was used.*", done.stderr)
    result.notes.append(f"{name}: {errors[0][:120] if errors else f'exit {done.returncode}'}")
    return False


def compare(
    result: Result, name: str, program: list[object], gpus: int, on_cpu: list[object]
) -> None:
    """A program that prints JSON with its losses, beside its run on the CPU."""
    done, cpu = run(*program, gpus=gpus), run(*on_cpu)
    if not judge(result, name, done):
        return
    found, expected = (json.loads(x.stdout.splitlines()[-1])["losses"] for x in (done, cpu))
    if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(found, expected, strict=True)):
        result.passed -= 1
        result.wrong += 1
        result.notes.append(f"{name}: {found} for {expected}")


def accelerate() -> Result:
    """The scripts that ``accelerate test`` and its own suite run on several GPUs."""
    result = Result()
    folder = Path(importlib.util.find_spec("accelerate").origin).parent / "test_utils" / "scripts"
    for path in sorted(folder.glob("test_*.py")):
        if path.stem not in ("test_cli", "test_notebook"):  # they start others of these
            judge(result, path.stem, run(*RANKS, path, gpus=2))
    judge(result, "accelerate launch", run(
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", folder / "test_ops.py",
        gpus=2,
    ))  # fmt: skip
    return result


def transformers() -> Result:
    """A tiny GPT-2: Trainer on the CPU, with DataParallel and DDP, and a model over three GPUs."""
    result = Result()
    program = [HERE / "trainer.py", "out"]
    cpu = [*RANKS, *program, "cpu"]
    compare(result, "Trainer, DataParallel", program, 2, cpu)
    compare(result, "Trainer, DDP", [*RANKS, *program], 2, cpu)
    judge(result, "device_map", run(HERE / "device_map.py", "model", gpus=3))
    return result


def lightning() -> Result:
    """A small network with Lightning's strategies, losses beside DDP's on the CPU."""
    result = Result()
    program = HERE / "lightning_fit.py"
    for strategy in ("ddp", "fsdp"):
        compare(result, strategy, [program, strategy, "cuda"], 2, [program, "ddp", "cpu"])
    return result


SUITES = {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}


def folder_of_tests(path: Path, gpus: int) -> Result:
    """The tests of a folder or file, by pytest."""
    result = Result()
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        done = run(
            "-m", "pytest", "-p", "pytest_vgpu", f"--vgpus={gpus}", "-q", "-p", "no:cacheprovider",
            f"--junit-xml={report.name}", path.resolve(),
        )  # fmt: skip
        text = Path(report.name).read_text("utf-8")
    if not text:
        judge(result, path.name, done)
        return result
    for case in ET.fromstring(text).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            said = "\n".join([bad.get("message", ""), bad.text or ""])
            ended = subprocess.CompletedProcess([], 1, "", said)
            judge(result, case.get("name", "?"), ended)
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    return result


HEAD = """\
# Programs that others wrote

What `make test-foreign` found: scripts and suites of packages that people train with, unchanged, on virtual GPUs. *Refused* ended with a sentence that says what virtual GPUs do not have. *Wrong number* ran and differs from the CPU by more than 1 in 10,000. Run it with the packages that you use: `make test-foreign ARGS="accelerate"`, or with a folder of tests: `make test-foreign ARGS="--gpus 4 path/to/tests"`.

- **accelerate**: the scripts of its `test_utils/scripts`, on two ranks, and one of them through `accelerate launch`.
- **transformers**: a tiny GPT-2 made from scratch, trained by `Trainer` on two GPUs with `DataParallel` and with DDP, its losses beside DDP's on the CPU; and spread over three GPUs by `device_map`.
- **lightning**: a small network with the strategies `ddp` and `fsdp` on two GPUs, its losses beside DDP's on the CPU.

"""
COLUMNS = "| suite | passed | refused in words | failed | wrong number | skipped | which |"


def table(rows: list[str]) -> str:
    torch = importlib.metadata.version("torch").partition("+")[0]
    head = f"Measured with torch {torch} on {datetime.date.today():%d %B %Y}."
    return "\n".join([HEAD + head, "", COLUMNS, "|---|---|---|---|---|---|---|", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-foreign", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(SUITES)}, or paths of tests")
    parser.add_argument("--gpus", type=int, default=4, help="for the tests of a path (default: 4)")
    options = parser.parse_args()
    rows = []
    for name in options.what or SUITES:
        if name in SUITES:
            if importlib.util.find_spec(name) is None:
                print(f"{name} is not installed: left out")
                continue
            rows.append(SUITES[name]().row(f"{name} {importlib.metadata.version(name)}"))
        elif Path(name).exists():
            rows.append(folder_of_tests(Path(name), options.gpus).row(Path(name).name))
        else:
            parser.error(f"{name!r} is neither a path nor one of {', '.join(SUITES)}")
        print(rows[-1], flush=True)
    if not options.what:
        PAGE.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
