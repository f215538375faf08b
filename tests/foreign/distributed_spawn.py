"""``distributed_test``, which is in PyTorch's wheel, with the NCCL backend.

It's set up as in test/distributed/test_distributed_spawn.py in PyTorch's repository.
"""

import os
import tempfile
import unittest
from pathlib import Path

import pytest
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

# This repository turns warnings into errors; PyTorch's doesn't.
pytestmark = pytest.mark.filterwarnings("default")

_RESNET = (
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_uneven_inputs",
)


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


for name in _RESNET:
    skip = unittest.skip("trains ResNet-50, which takes more than 7 minutes on CPU cores")
    setattr(TestDistBackendWithSpawn, name, skip(getattr(TestDistBackendWithSpawn, name)))
