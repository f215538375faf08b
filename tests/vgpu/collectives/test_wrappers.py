"""Wrappers around virtual tensors, random numbers across ranks, and which modules are imported."""

import subprocess
import sys

import pytest
import torch
from cells import cell

from teaching.lessons import ROOT
from vgpu import launch
from vgpu.memory import gpus

pytestmark = pytest.mark.virtual_gpus(2)


def test_a_wrapper_shows_the_virtual_device_and_can_be_moved():
    class Around(torch.Tensor):
        """A wrapper subclass as a user might write it."""

        @staticmethod
        def __new__(cls, inside):
            made = torch.Tensor._make_wrapper_subclass(
                cls, inside.size(), dtype=inside.dtype, device=inside.device
            )
            made.inside = inside
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            plain = [a.inside if isinstance(a, Around) else a for a in args]
            return Around(func(*plain, **(kwargs or {})))

    one = Around(torch.ones(3, device="vgpu:1"))
    assert one.device == torch.device("vgpu:1")
    assert one.to("vgpu:1") is one and one.to("vgpu:0").inside.device == torch.device("vgpu:0")
    both = torch.add(torch.ones(3, device="vgpu:1"), one)
    assert type(both) is Around and both.inside.tolist() == [2.0, 2.0, 2.0]
    assert Around(torch.ones(2)).device == torch.device("cpu")


def test_a_generators_state_is_complete_and_has_an_offset():
    generator = torch.Generator("vgpu:0").manual_seed(7)
    torch.rand(3, device="vgpu:0", generator=generator)
    state = generator.get_state()
    expected = torch.rand(5, device="vgpu:0", generator=generator)
    assert gpus.offset_in(state).item() == 0
    other = torch.Generator("vgpu:1")
    other.set_state(state)
    assert other.initial_seed() == 7
    assert torch.equal(torch.rand(5, device="vgpu:1", generator=other).cpu(), expected.cpu())

    def drawn_at(offset):
        moved = state.clone()
        gpus.set_offset_in(moved, offset)
        other.set_state(moved)
        return torch.rand(5, device="vgpu:1", generator=other).cpu()

    assert torch.equal(drawn_at(8), drawn_at(8))
    assert not torch.equal(drawn_at(8), drawn_at(12))
    assert other.initial_seed() == 7 and gpus.offset_in(other.get_state()).item() == 12


def test_shards_draw_different_numbers_and_replicas_the_same():
    source = """
    def main(rank, world):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, rand
        mesh = init_device_mesh("vgpu", (2, 2))
        torch.manual_seed(5)
        drawn = [rand(4, 6, device_mesh=mesh, placements=[Replicate(), Shard(0)]) for _ in "ab"]
        return [d.to_local().cpu() for d in drawn], [d.full_tensor().cpu() for d in drawn]
    """
    ranks = launch.run(cell(source)["main"], 4, gpu="V100")
    (first, second), whole = zip(*(r[0] for r in ranks), strict=True), ranks[0][1]
    assert torch.equal(first[0], first[2]) and torch.equal(first[1], first[3])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for r in ranks for a, b in zip(r[1], whole, strict=True))


def test_enabling_uses_no_device_and_imports_neither_dtensor_nor_fsdp():
    script = (
        "import sys, torch; import vgpu; vgpu.enable(2)\n"
        "assert not torch.vgpu.is_initialized()\n"
        "late = [m for m in sys.modules if m.startswith(('torch.distributed.tensor.',"
        " 'torch.distributed.fsdp.'))]\n"
        "assert not late, late\n"
        "from torch.distributed.tensor import DTensor, _random\n"
        "assert 'device' in vars(DTensor) and _random._PhiloxState.__module__.startswith('vgpu')\n"
        "torch.ones(1, device='vgpu:1'); assert torch.vgpu.is_initialized()\n"
        "vgpu.disable()\n"
        "assert 'device' not in vars(DTensor)\n"
        "assert _random._PhiloxState.__module__ == 'torch.distributed.tensor._random'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
