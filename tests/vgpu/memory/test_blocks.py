"""Byte counts: per storage, rounded up, freed with the last reference, limited, and recorded."""

import copy
import gc

import pytest
import torch
from torch import nn

import vgpu
from vgpu.memory import blocks

MIB = 2**20


pytestmark = pytest.mark.virtual_gpus(3, memory_bytes=64 * MIB)


@pytest.fixture(autouse=True)
def empty():
    gc.collect()
    assert [torch.vgpu.memory_allocated(i) for i in range(3)] == [0, 0, 0]


def allocated(index=0):
    return torch.vgpu.memory_allocated(index)


@pytest.mark.parametrize(("numel", "expected"), [(0, 0), (1, 512), (128, 512), (129, 1024)])
def test_sizes_are_rounded_up_to_512_bytes(numel, expected):
    x = torch.empty(numel, device="vgpu:1")
    assert [allocated(i) for i in range(3)] == [0, expected, 0]
    del x
    assert allocated(1) == 0


def test_a_storage_counts_once_and_lives_as_long_as_any_view():
    x = torch.zeros(1024, device="vgpu:0")
    row = x.view(32, 32)[3]
    detached, data = x.detach(), x.data
    assert allocated() == 4096
    del x, detached, data
    assert allocated() == 4096
    row += 1
    assert allocated() == 4096
    del row
    assert allocated() == 0


def test_saved_tensors_count_until_the_graph_is_freed():
    w = torch.ones(1024, device="vgpu:0", requires_grad=True)
    y = w.exp()  # saves its result
    loss = y.sum()
    assert allocated() == 4096 + 4096 + 512
    del y
    assert allocated() == 4096 + 4096 + 512
    loss.backward()  # frees what was saved, creates w.grad
    assert allocated() == 4096 + 4096 + 512
    w.grad = None
    del loss
    assert allocated() == 4096


def test_peak_is_kept_until_it_is_reset():
    x = torch.zeros(MIB, device="vgpu:0")
    assert torch.vgpu.max_memory_allocated() == 4 * MIB
    del x
    assert torch.vgpu.max_memory_allocated() == 4 * MIB
    torch.vgpu.reset_peak_memory_stats()
    assert torch.vgpu.max_memory_allocated() == 0
    assert torch.accelerator.max_memory_allocated() == 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.empty(20 * MIB, device="vgpu:1"),
        lambda: torch.randn(20 * MIB, device="vgpu:1"),
        lambda: torch.ones(20 * MIB).to("vgpu:1"),
        lambda: torch.ones(1, device="vgpu:1").expand(20 * MIB).contiguous(),
    ],
)
def test_an_allocation_that_does_not_fit_raises_cudas_error_and_leaks_nothing(ask):
    kept = torch.zeros(MIB, device="vgpu:1")
    words = (
        r"VGPU out of memory\. Tried to allocate 80\.00 MiB\. GPU 1 has a total capacity of "
        r"64\.00 MiB of which 4[24]\.00 MiB is free\. "
    )
    with pytest.raises(torch.OutOfMemoryError, match=words):
        ask()
    gc.collect()
    assert allocated(1) == 4 * MIB
    assert kept.add_(1).sum().item() == MIB
    assert torch.empty(15 * MIB, device="vgpu:1").numel() == 15 * MIB


def test_strides_are_not_mistaken_for_sizes():
    y = torch.empty_strided((4, 1), (1, 1 << 40), device="vgpu:0")
    assert y.new_empty_strided((4, 1), (1, 1 << 40)).shape == (4, 1)
    assert allocated() == 512


def test_the_bytes_of_a_training_step_are_the_sum_of_its_parts():
    layer = nn.Linear(256, 256, bias=False, device="vgpu:0")
    size = 256 * 256 * 4
    assert allocated() == size
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(256, 256, device="vgpu:0")).sum().backward()
    assert allocated() == 2 * size
    optimizer.step()
    assert allocated() == 4 * size
    optimizer.zero_grad()
    assert allocated() == 3 * size


def test_resizing_in_place_is_counted():
    x = torch.zeros(128, device="vgpu:0")
    x.resize_(1024)
    assert allocated() == 4096
    out = torch.empty(0, device="vgpu:0")
    torch.add(x, 1, out=out)
    assert out.shape == (1024,)
    assert allocated() == 8192


def test_resizing_a_storage_is_counted():
    x = torch.ones(1000, device="vgpu:0")
    storage = x.untyped_storage()
    storage.resize_(0)
    assert torch.vgpu.memory_allocated(0) == 0
    storage.resize_(4000)
    assert torch.vgpu.memory_allocated(0) == 4096
    with pytest.raises(torch.OutOfMemoryError):
        storage.resize_(128 * MIB)
    assert storage.nbytes() == 4000
    assert torch.vgpu.memory_allocated(0) == 4096


def test_a_sparse_tensor_changed_in_place_is_recounted():
    some = torch.eye(100).to_sparse().to("vgpu:0")
    every = torch.ones(100, 100).to_sparse().to("vgpu:0")
    some.add_(every)
    assert some._nnz() == 10000
    del every
    parts = [part.untyped_storage().nbytes() for part in (some._indices(), some._values())]
    assert torch.vgpu.memory_allocated(0) == sum(-(-part // 512) * 512 for part in parts)


@pytest.mark.parametrize(
    "grow",
    [
        lambda out: torch.add(ones(8 * MIB, 1), ones(1, 4), out=out),
        lambda out: out.resize_(20 * MIB),
        lambda out: out.resize_as_(ones(1).expand(20 * MIB)),
    ],
)
def test_out_of_memory_in_place_leaves_sizes_and_bytes_unchanged(grow):
    out = torch.empty(0, device="vgpu:0")
    with pytest.raises(torch.OutOfMemoryError):
        grow(out)
    assert out.shape == out._inner.shape == (0,)
    gc.collect()
    assert allocated() == out.untyped_storage().nbytes() == 0
    assert out.resize_(10).fill_(1).sum().item() == 10


def ones(*size):
    return torch.ones(size, device="vgpu:0")


def test_moving_a_module_moves_its_bytes():
    module = nn.Linear(64, 64).to("vgpu:0")
    module(torch.ones(1, 64, device="vgpu:0")).sum().backward()
    here = allocated(0)
    module.to("vgpu:2")
    assert (allocated(0), allocated(2)) == (0, here)
    module.cpu()
    assert (allocated(0), allocated(2)) == (0, 0)


def test_a_record_shows_where_and_by_which_operation_memory_was_allocated():
    with vgpu.record_memory() as record:
        x = torch.zeros(256, device="vgpu:1")
        y = x @ x
        del x
        z = y.to("vgpu:2")
    told = [(str(e.device), e.size_bytes, e.allocated_bytes, e.operation) for e in record.events]
    assert told == [
        ("vgpu:1", 1024, 1024, "empty"),
        ("vgpu:1", 512, 1536, "dot"),
        ("vgpu:1", -1024, 512, "empty"),
        ("vgpu:2", 512, 512, "copy"),
    ]
    assert record.allocated_bytes("vgpu:1") == [1024, 1536, 512]
    assert (record.peak_bytes("vgpu:1"), record.peak_bytes("vgpu:0")) == (1536, 0)
    del z
    assert len(record.events) == 4


def test_sparse_tensors_count_their_parts():
    x = torch.eye(128).to_sparse().to("vgpu:0")
    assert allocated() == 2 * 128 * 8 + 128 * 4
    del x
    assert allocated() == 0


def test_set_per_process_memory_fraction_limits_what_is_allocated():
    assert torch.vgpu.get_per_process_memory_fraction(1) == 1
    torch.vgpu.set_per_process_memory_fraction(0.25, "vgpu:1")
    assert torch.vgpu.get_per_process_memory_fraction(1) == 0.25
    assert torch.vgpu.mem_get_info(1) == (64 * MIB, 64 * MIB)
    words = "64.00 MiB is free.*memory in use. 16.00 MiB allowed; Of the allocated memory 0 bytes"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        torch.empty(17 * MIB, dtype=torch.uint8, device="vgpu:1")
    torch.empty(16 * MIB, dtype=torch.uint8, device="vgpu:1")
    torch.empty(17 * MIB, dtype=torch.uint8, device="vgpu:0")
    torch.vgpu.set_per_process_memory_fraction(1.0, 1)
    torch.empty(17 * MIB, dtype=torch.uint8, device="vgpu:1")


@pytest.mark.parametrize(
    ("fraction", "kind"), [(1.5, ValueError), (-0.1, ValueError), (1, TypeError)]
)
def test_a_bad_memory_fraction_is_rejected(fraction, kind):
    with pytest.raises(kind, match="fraction"):
        torch.vgpu.set_per_process_memory_fraction(fraction)


def test_a_copy_of_a_tensors_attributes_is_on_the_same_gpu():
    # dcp.async_save copies them one by one; it must not copy the GPU along with its blocks.
    with vgpu.enable(1):
        attributes = vars(torch.ones(3, device="vgpu:0"))
        copied = copy.deepcopy(attributes["_gpu"])
        assert copied is attributes["_gpu"]


def test_a_record_includes_tensors_that_gloo_drops_slightly_late():
    class HeldByGloo:
        """A tensor that only gloo's thread still holds, until someone waits for gloo to return it."""

        def __init__(self):
            self.tensor = torch.zeros(1024, device="vgpu:0")

        def is_dropped(self):
            return True

        def wait_for_return(self):
            self.tensor = None

    before, inside = HeldByGloo(), HeldByGloo()
    blocks.borrowed.append(before)
    with vgpu.record_memory() as record:
        blocks.borrowed.append(inside)
    assert [(event.size_bytes, event.allocated_bytes) for event in record.events] == [(-4096, 0)]
