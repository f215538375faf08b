"""Seconds a lesson takes under nbmake, and the whole collection, serial and with two workers."""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*options: str) -> tuple[float, str]:
    """Seconds that ``pytest --nbmake notebooks`` took, and what it printed."""
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-q"]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--timeout=600", "--durations=0", *options, "notebooks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the lessons do not pass:\n{done.stdout[-3000:]}")
    return time.perf_counter() - started, done.stdout


def main() -> str:
    serial_s, printed = run()
    parallel_s, _ = run("-n", "2")
    seconds = re.findall(r"([\d.]+)s call\s+notebooks/(\w+)\.ipynb", printed)
    rows = "\n".join(f"| {name} | {value} |" for value, name in sorted(seconds, key=lambda s: s[1]))
    return (
        "## Lessons under nbmake\n\n"
        f"| lesson | seconds |\n|---|---|\n{rows}\n"
        f"| all, one after another | {serial_s:.0f} |\n"
        f"| all, with two workers | {parallel_s:.0f} |\n\n"
        f"Two workers take {parallel_s / serial_s:.2f} of the serial time.\n"
    )


if __name__ == "__main__":
    print(main())
