"""``torch.vgpu`` has ``torch.cuda``'s names and behaves like it."""

import importlib
import operator

import pytest
import torch

pytestmark = pytest.mark.virtual_gpus(3)


def test_the_module_behaves_like_torch_cuda():
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


def test_submodules_have_torch_cudas_names():
    assert importlib.import_module("torch.vgpu.memory") is torch.vgpu.memory
    assert torch.vgpu.memory.memory_allocated is torch.vgpu.memory_allocated
    assert torch.vgpu.random.initial_seed() == torch.vgpu.initial_seed()
    nvtx = torch.vgpu.nvtx
    with nvtx.range("step {}", 3):
        assert nvtx.range_push("inside") == nvtx.range_pop() == 0
    nvtx.range_end(nvtx.range_start("elsewhere"))
    nvtx.mark("now")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("vgpu.CUDAGraph", "torch.cuda has it, but virtual GPUs don't support it; skip it"),
        ("vgpu.FloatTensor", "create tensors with dtype= and device="),
        ("vgpu.nonsense", "'torch.vgpu' has no attribute 'nonsense'$"),
        (
            "vgpu.memory.memory_snapshot",
            "'torch.vgpu.memory' has no attribute 'memory_snapshot': torch.cuda.memory has it",
        ),
        ("vgpu.amp.nonsense", "'torch.vgpu.amp' has no attribute 'nonsense'$"),
        ("vgpu.nvtx.nonsense", "'torch.vgpu.nvtx' has no attribute 'nonsense'$"),
        ("vgpu.random.nonsense", "'torch.vgpu.random' has no attribute 'nonsense'$"),
    ],
)
def test_an_error_names_attributes_that_only_torch_cuda_has(name, advice):
    with pytest.raises(AttributeError, match=advice):
        operator.attrgetter(name)(torch)


def test_torch_accepts_the_name_of_a_tensor_type():
    x = torch.ones(2, device="vgpu:1")
    assert torch.ones(2).type("torch.vgpu.HalfTensor").type() == x.half().type()
    with pytest.raises(AttributeError, match="set_default_device"):
        torch.set_default_tensor_type("torch.vgpu.FloatTensor")
