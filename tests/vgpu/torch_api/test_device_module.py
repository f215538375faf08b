"""``torch.vgpu`` has the names of ``torch.cuda`` and answers as it does."""

import pytest
import torch

pytestmark = pytest.mark.virtual_gpus(3)


def test_the_module_answers_as_torch_cuda_does():
    assert torch.get_device_module("vgpu:1") is torch.vgpu
    assert torch.vgpu.device_count() == torch.accelerator.device_count() == 3
    assert torch.accelerator.current_accelerator().type == "vgpu"
    properties = torch.vgpu.get_device_properties(1)
    assert properties.total_memory == 16 * 2**30
    assert properties.name == torch.vgpu.get_device_name("vgpu:1")
    assert (properties.major, properties.minor) == torch.vgpu.get_device_capability()
    torch.vgpu.synchronize()
    torch.accelerator.synchronize(2)
    assert torch.vgpu.memory_stats(1)["allocated_bytes.all.current"] == 0
    torch.vgpu.set_device(-1)
    assert torch.vgpu.current_device() == 0
    assert torch.vgpu.can_device_access_peer(0, 1) and not torch.vgpu.can_device_access_peer(1, 1)
    assert torch.vgpu.is_bf16_supported()
    missing = [name for name in torch.vgpu.__all__ if not hasattr(torch.vgpu, name)]
    assert not missing
