"""Some hundred random programs compute the same on virtual GPUs as on the CPU.

``cd tests; python -m vgpu.random_programs --seconds 3600`` looks for longer.
"""

from itertools import islice

import pytest
from vgpu.random_programs.steps import programs
from vgpu.random_programs.worlds import PRELUDE, difference, shrunk

pytestmark = pytest.mark.virtual_gpus(2)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_programs_agree_with_the_cpu(first):
    for seed, lines in islice(programs(first), 50):
        if difference(lines):
            lines = shrunk(lines)
            pytest.fail("\n".join([f"seed {seed}: {difference(lines)}", PRELUDE, *lines]))
