"""Run a program on virtual GPUs, and report the outcome."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFUSED = re.compile(r"NotImplementedError: (.+)")
NOT_CLOSE = re.compile(r"(?:Tensor-likes|Scalars) are not close")

Done = subprocess.CompletedProcess[str]


@dataclass
class Result:
    """The outcomes of a suite's programs, each of which counts once."""

    passed: int = 0
    refused: int = 0
    """Ended with NotImplementedError, which virtual GPUs or the package itself raised."""
    failed: int = 0
    wrong: int = 0
    """Ran, but with values that differ from the CPU's."""
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

    def row(self, *name: str) -> str:
        """Return a row of the table. name: the suite's name and version."""
        torch = importlib.metadata.version("torch").partition("+")[0]
        numbers = (self.passed, self.refused, self.failed, self.wrong, self.skipped)
        notes = "; ".join(dict.fromkeys(self.notes)).replace("|", "/")
        return f"| {' '.join(name)} | {torch} | {' | '.join(map(str, numbers))} | {notes} |"


def ranks(count: int) -> list[object]:
    """Return the arguments to put before a program's path so that torchrun starts ``count`` ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]


def run(
    *arguments: object,
    gpus: int = 0,
    gpu: str = "H100",
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    time_limit_s: float = 900,
) -> Done:
    """Run a Python program with ``gpus`` virtual GPUs, in ``folder`` or in an empty one."""
    command = [
        sys.executable,
        *(["-m", "vgpu", "--cuda-is-vgpu", f"--count={gpus}", f"--gpu={gpu}"] if gpus else []),
    ]
    command += map(str, arguments)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as empty:
        try:
            return subprocess.run(
                command, cwd=folder or empty, env=environment | dict(variables or {}), text=True,
                capture_output=True, timeout=time_limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"longer than {time_limit_s} s")


def judge(result: Result, name: str, done: Done) -> bool:
    """Count a program's outcome; return True if it passed, so that losses can be compared."""
    if done.returncode == 0 and "no virtual GPU was used" not in done.stderr:
        result.passed += 1
        return True
    said = done.stderr + done.stdout  # torchrun's --tee copies a rank's errors to its output
    if done.returncode and (found := REFUSED.findall(said)):
        result.refused += 1
        result.notes.append(f"{name}: {found[-1][:120]}")
        return False
    if NOT_CLOSE.search(said):
        result.wrong += 1
    else:
        result.failed += 1
    errors = re.findall(r"\w*Error: .+|longer than .+|no virtual GPU was used.*", said)
    result.notes.append(f"{name}: {errors[0][:120] if errors else f'exit {done.returncode}'}")
    return False


def compare(
    result: Result, name: str, done: Done, expected: Done, losses: Callable[[Done], list[float]]
) -> None:
    """Count a program that prints losses, and compare the losses with a reference run's."""
    if not judge(result, name, done):
        return
    found, right = losses(done), losses(expected)
    if not right:
        raise RuntimeError(f"{name}: the reference run printed no losses\n{expected.stderr}")
    if len(found) != len(right) or any(
        abs(a - b) > 1e-4 * abs(b) for a, b in zip(found, right, strict=True)
    ):
        result.passed -= 1
        result.wrong += 1
        result.notes.append(f"{name}: {found}, expected {right}")


def printed(pattern: str) -> Callable[[Done], list[float]]:
    """Return a function that reads the numbers after ``pattern`` in a program's output."""
    number = re.compile(pattern + r"\s*(-?\d+\.\d+)")
    return lambda done: [float(x) for x in number.findall(done.stdout)]
