"""``distributed_test``, which is in PyTorch's wheel, with the NCCL backend.

It's set up as by test/distributed/test_distributed_spawn.py in PyTorch's repository.
"""

import os
import tempfile
from pathlib import Path

import torch

os.environ["BACKEND"] = "nccl"
os.environ["WORLD_SIZE"] = str(torch.cuda.device_count())
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
    for name in ("barrier", "init_dir", "test_dir"):
        (Path(os.environ["TEMP_DIR"]) / name).mkdir()

from torch.testing._internal.distributed.distributed_test import (
    DistributedTest,
    TestDistBackend,
)


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
