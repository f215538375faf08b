"""PyTorch's ``distributed_test``, which its wheel carries, with the NCCL backend.

As test/distributed/test_distributed_spawn.py in PyTorch's repository runs it.
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
