"""Some hundred random programs compute the same on virtual GPUs as on the CPU.

``TESTS=all`` tries three hundred; ``cd tests; python -m random_programs --seconds 3600`` looks
for longer.
"""

import os
import subprocess
import sys

import pytest
from levels import ALL

from teaching.lessons import ROOT

# In a process of their own: what a program leaves allocated must not meet tests that count bytes.
SCRIPT = """
import sys
from itertools import islice
import vgpu
from random_programs.steps import programs
from random_programs.worlds import PRELUDE, difference, shrunk

with vgpu.enable(2):
    for seed, lines in islice(programs(int(sys.argv[1])), 150):
        if difference(lines):
            lines = shrunk(lines)
            sys.exit("\\n".join([f"seed {seed}: {difference(lines)}", PRELUDE, *lines]))
print("all agree")
"""


@pytest.mark.parametrize("first", range(0, 300 if ALL else 150, 150))
def test_programs_agree_with_the_cpu(first):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(first)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"},
    )
    assert done.returncode == 0 and done.stdout == "all agree\n", done.stderr
