"""Run every benchmark and write RESULTS.md: ``python -m benchmarks [name ...]``.

Each script in this folder has ``main() -> str``, which returns a Markdown section. If names are
passed, only their sections of RESULTS.md are replaced.
"""

import importlib
import os
import platform
import re
import sys
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"


def head() -> str:
    """Describe the machine and the versions, in general terms."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else 0
    size = f", {memory / 2**30:.0f} GiB of memory" if memory else ""
    return (
        "# Measured side by side\n\n"
        f"{date.today()}: torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores{size}. Machines are "
        "noisy: read the ratios, which come from one run each. `make bench` writes this file.\n"
    )


def main() -> None:
    scripts = sorted(path.stem for path in HERE.glob("[a-z]*.py"))
    wanted = sys.argv[1:] or scripts
    unknown = set(wanted) - set(scripts)
    if unknown:
        sys.exit(f"unknown benchmarks: {', '.join(unknown)}; available: {', '.join(scripts)}")
    kept = {}
    if RESULTS.exists():
        for name, text in re.findall(
            r"<!-- (\w+) -->\n(.*?)(?=<!-- |\Z)", RESULTS.read_text(encoding="utf-8"), re.DOTALL
        ):
            kept[name] = text.strip()
    for name in wanted:
        print(f"measuring {name} ...", flush=True)
        kept[name] = importlib.import_module(f"benchmarks.{name}").main().strip()
        sections = "\n".join(f"<!-- {n} -->\n{kept[n]}\n" for n in scripts if n in kept)
        RESULTS.write_text(f"{head()}\n{sections}", encoding="utf-8")


if __name__ == "__main__":
    main()
