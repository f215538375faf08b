"""Two virtual GPUs for every conformance test, which uses the second one."""

import pytest
import torch

import vgpu


@pytest.fixture(autouse=True, scope="module")
def _virtual_gpus():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    with vgpu.enable(2):
        yield
    torch.set_num_threads(threads)
