"""A long run: ``cd tests/support; python -m random_programs --seconds 3600 --seed 1``.

Prints each program that differs between the CPU and virtual GPUs, shortened as far as possible.
"""

import argparse
import sys
import time

from random_programs.steps import programs
from random_programs.worlds import PRELUDE, difference, shrunk

import vgpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="how long to run")
    parser.add_argument(
        "--programs", type=int, default=sys.maxsize, help="stop after this many programs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    parser.add_argument("--most", type=int, default=5, help="stop after this many differences")
    options = parser.parse_args()
    started, count, found = time.monotonic(), 0, 0
    with vgpu.enable(2):
        for seed, lines in programs(options.seed):
            late = time.monotonic() - started > options.seconds
            if late or options.most == found or options.programs == count:
                break
            count += 1
            if first := difference(lines):
                found += 1
                lines = shrunk(lines)
                print(f"\n# seed {seed}: {difference(lines) or first}", PRELUDE, sep="\n")
                print(*lines, sep="\n", flush=True)
    print(f"\n{count} programs in {time.monotonic() - started:.0f} s, {found} of them differ")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
