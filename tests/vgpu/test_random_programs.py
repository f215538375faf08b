"""About a hundred random programs have the same results on virtual GPUs as on the CPU.

``TESTS=all`` tries three hundred; ``cd tests/support; python -m random_programs --seconds 3600``
searches for longer.
"""

import os
import subprocess
import sys

import pytest
from levels import ALL

from teaching.lessons import ROOT


@pytest.mark.parametrize("first", range(0, 300 if ALL else 150, 150))
def test_random_programs_agree_with_the_cpu(first):
    # In a separate process: what a program leaves allocated must not affect tests that count bytes.
    options = ["-W", "ignore", "-m", "random_programs", "--seed", str(first), "--programs", "150"]
    done = subprocess.run(
        [sys.executable, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"},
    )
    assert done.returncode == 0 and done.stdout.startswith("\n150 programs"), done.stdout
