"""``make test-gpu``: tests that need NVIDIA GPUs. Without one, it says what's missing.

Exits with 0 on success, 1 if something failed or differed, and 2 if nothing could be run.
"""

import datetime
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from real_gpus import comparison

from teaching import lessons

PAGE = lessons.ROOT / "docs" / "real_gpus.md"
NOTHING_YET = "No real GPU has been measured yet.\n"
HEADING = "## Measured\n\n"


@dataclass(frozen=True)
class Machine:
    """What this machine offers for tests on real GPUs."""

    gpus: Sequence[str]
    torch: str
    cuda: str | None
    nccl: bool

    @classmethod
    def here(cls) -> "Machine":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(index) for index in range(count)]
        return cls(names, torch.__version__, torch.version.cuda, dist.is_nccl_available())

    def missing(self) -> list[str]:
        """Return a sentence for each thing that keeps some part from running."""
        if self.cuda is None:
            return [
                f"PyTorch {self.torch} is a build without CUDA: make clean, then make venv CUDA=1"
            ]
        if not self.gpus:
            return [
                "there is no NVIDIA GPU that PyTorch can use (run nvidia-smi, and check the driver)"
            ]
        found = (
            []
            if self.nccl
            else ["this build of PyTorch has no NCCL, which ranks on real GPUs need"]
        )
        if len(self.gpus) < 4:
            found.append(
                f"GPUs here: {len(self.gpus)}; tests that need more are skipped, "
                "and lessons that need more use virtual ones"
            )
        return found


def describe(machine: Machine) -> str:
    """Return the three steps, each with what it needs and the command that runs only it."""
    wants = ", ".join(f"{number}: {count}" for number, count in gpus_of_lessons().items())
    return f"""\
make test-gpu does three things with real GPUs:
1. a comparison of real and virtual GPUs: errors (word for word), peak bytes, the order of times;
   needs 1 GPU, and compares more with 2. The result goes into docs/real_gpus.md.
     python tests/real_gpus/observed.py
2. ranks over NCCL: collectives, DDP, FSDP2, tensor parallelism, pipelines, a hang; on 1, 2 and 4.
     REAL_GPUS=1 pytest tests/real_gpus
3. every lesson, on real GPUs if there are as many as it asks for (lesson: GPUs): {wants};
   its ranks use real GPUs if there is one for each.
     pytest --nbmake notebooks"""


def gpus_of_lessons() -> dict[str, int]:
    """Map the number of each lesson that asks for GPUs to the most that it asks for."""
    found = {}
    for path in lessons.NOTEBOOKS:
        text = "\n".join(cell.source for cell in lessons.cells(path) if cell.is_code)
        counts = re.findall(r"devices\.lab\((\d+)\)", text)
        if counts and lessons.number(path):
            found[lessons.number(path)] = max(map(int, counts))
    return found


def with_result(text: str, section: str) -> str:
    """Return the page's text with one more section, above the older ones."""
    assert text.count(HEADING) == 1, f"{PAGE.name} has no heading {HEADING.strip()!r}"
    return text.replace(NOTHING_YET, "").replace(HEADING, HEADING + section + "\n").rstrip() + "\n"


def compare(machine: Machine) -> bool:
    """Run step 1; return whether nothing differed."""
    preset = comparison.preset_for(machine.gpus[0])
    real = comparison.observe()
    virtual = comparison.observe(*comparison.virtual_command(len(machine.gpus), preset))
    section = comparison.page(real, virtual, datetime.date.today().isoformat())
    print(section)
    PAGE.write_text(with_result(PAGE.read_text(encoding="utf-8"), section), encoding="utf-8")
    return not comparison.differences(real, virtual)


def run(*arguments: str) -> bool:
    """Run pytest, for steps 2 and 3; return whether it passed."""
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = {**os.environ, "REAL_GPUS": "1"}
    return subprocess.run(command, cwd=lessons.ROOT, env=environment).returncode == 0


def main() -> int:
    machine = Machine.here()
    missing = "".join(f"missing: {sentence}\n" for sentence in machine.missing())
    if not machine.gpus:
        print(f"{describe(machine)}\n{missing}Nothing was run.")
        return 2
    print(
        f"{len(machine.gpus)} × {machine.gpus[0]}, PyTorch {machine.torch}\n{missing}", flush=True
    )
    went_well = {
        "comparison": compare(machine),
        "ranks": run("tests/real_gpus", "--timeout=300"),
        "lessons": run("--nbmake", "--nbmake-timeout=300", "--timeout=900", "notebooks"),
    }
    for name, well in went_well.items():
        print(f"{name}: {'passed' if well else 'failed or differed, see above'}")
    return 0 if all(went_well.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
