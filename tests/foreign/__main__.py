"""``make test-foreign``: third-party programs and test suites on virtual GPUs.

Runs installed packages, or programs in a folder. Nothing is downloaded. With --write, each suite's
row is written to the table in docs/foreign.md.

    python tests/foreign                          the suites of all installed packages
    python tests/foreign accelerate torch         only these suites
    python tests/foreign nanogpt=path             a program in a folder (also picotron and others)
    python tests/foreign path/to/tests            the tests in a folder or file, with pytest
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from programs import PROGRAMS, run_program
from results import ROOT, Done, Result, compare, judge, ranks, run

HERE = Path(__file__).resolve().parent
PLUGINS = HERE / "pytest_plugins"
PAGE = ROOT / "docs" / "foreign.md"


def losses(done: Done) -> list[float]:
    """Return the losses that a program printed as JSON."""
    return json.loads(done.stdout.splitlines()[-1])["losses"]


def accelerate() -> Result:
    """Run the scripts that ``accelerate test`` and accelerate's own suite run on multiple GPUs."""
    result = Result()
    folder = Path(importlib.util.find_spec("accelerate").origin).parent / "test_utils" / "scripts"
    for path in sorted(folder.glob("test_*.py")):
        if path.stem not in ("test_cli", "test_notebook"):  # they start other scripts
            judge(result, path.stem, run(*ranks(2), path, gpus=2))
    judge(result, "accelerate launch", run(
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", folder / "test_ops.py",
        gpus=2,
    ))  # fmt: skip
    return result


def transformers() -> Result:
    """Train a tiny GPT-2 with DataParallel and DDP, as on the CPU; split one across three GPUs."""
    result = Result()
    program = [HERE / "trainer.py", "out"]
    cpu = run(*ranks(2), *program, "cpu")
    compare(result, "Trainer, DataParallel", run(*program, gpus=2), cpu, losses)
    compare(result, "Trainer, DDP", run(*ranks(2), *program, gpus=2), cpu, losses)
    judge(result, "device_map", run(HERE / "device_map.py", "model", gpus=3))
    return result


def lightning() -> Result:
    """Train a small network with DDP and FSDP; compare its losses with DDP's on the CPU."""
    result = Result()
    program = HERE / "lightning_fit.py"
    cpu = run(program, "ddp", "cpu")
    for strategy in ("ddp", "fsdp"):
        compare(result, strategy, run(program, strategy, "cuda", gpus=2), cpu, losses)
    return result


def torch() -> Result:
    """Run the tests of collectives, process groups and DDP in PyTorch's wheel, on two ranks."""
    return folder_of_tests(HERE / "distributed_spawn.py", 2)


def folder_of_tests(path: Path, gpus: int) -> Result:
    """Run the tests in a file, or in each file in a folder, with pytest."""
    result = Result()
    given = filter(None, [os.environ.get("PYTHONPATH")])
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGINS), *given])}
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    if not files:
        sys.exit(f"no tests in {path}: pass a file, or a folder with files named test_*.py")
    for file in files:
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            done = run(
                "-m", "pytest", "-p", "pytest_vgpu", f"--vgpus={gpus}", "-p", "forked_ranks",
                "-q", "-p", "no:cacheprovider", f"--junit-xml={report.name}", file.resolve(),
                variables=variables, time_limit_s=7200,
            )  # fmt: skip
            text = Path(report.name).read_text("utf-8")
        if not text:
            judge(result, file.name, done)
            continue
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


SUITES = {
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
    "torch": torch,
}
MARKS = "<!-- measured -->\n", "<!-- /measured -->"
COLUMNS = "| suite | torch | passed | refused | failed | wrong number | skipped | details |"


def write_row(row: str) -> None:
    """Write a row to the table between the page's markers; it replaces the suite's old row."""
    begin, end = MARKS
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    table, _, after = rest.partition(end)
    rows = {line.split(" | ")[0].split()[1]: line for line in table.splitlines()[2:]}
    rows[row.split()[1]] = row
    lines = [COLUMNS, "|---" * COLUMNS.count(" |") + "|", *rows.values()]
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-foreign", description=__doc__)
    parser.add_argument(
        "what", nargs="*", help=f"{', '.join(SUITES)}, program=folder, or paths of tests"
    )
    parser.add_argument(
        "--gpus", type=int, default=4, help="virtual GPUs for tests in a path (default: 4)"
    )
    parser.add_argument("--write", action="store_true", help="write the rows to docs/foreign.md")
    options = parser.parse_args()
    for name in options.what or SUITES:
        if name in SUITES:
            if importlib.util.find_spec(name) is None:
                print(f"{name} skipped: it is not installed")
                continue
            row = SUITES[name]().row(name, importlib.metadata.version(name).partition("+")[0])
        elif name.partition("=")[0] in PROGRAMS:
            program, _, path = name.partition("=")
            if not (Path(path) / "README.md").exists():
                parser.error(f"{name!r}: pass the program's folder, as in {program}=path/to/it")
            result = run_program(program, Path(path))
            if isinstance(result, str):
                print(result)
                continue
            row = result.row(program)
        elif Path(name).exists():
            row = folder_of_tests(Path(name), options.gpus).row(Path(name).name)
        else:
            parser.error(f"{name!r} is neither a path nor one of {', '.join(SUITES)}")
        print(row, flush=True)
        if options.write:
            write_row(row)


if __name__ == "__main__":
    main()
