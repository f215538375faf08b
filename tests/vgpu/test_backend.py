"""``disable`` leaves torch as it was, except for what torch allows only once per process."""

import ast
import subprocess
import sys

import pytest
import torch

import vgpu

# Runs in a fresh process, where virtual GPUs were never enabled.
COMPARE = """
import sys, types
import torch, torch.nn.parallel.data_parallel
import vgpu

def owners():
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            yield name, module
    for kind in (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.nn.utils.rnn.PackedSequence,
                 torch.UntypedStorage, torch.TypedStorage, torch.Generator,
                 torch._C._autograd.DeviceType, torch._C._profiler.ProfilerActivity):
        yield f"class {kind.__name__}", kind

def snapshot():
    return {(owner, name): value for owner, at in owners() for name, value in vars(at).items()}

def contents():
    # The items of lists, sets and dicts, which may have been changed in place.
    kinds = (*owners(), ("Backend", torch.distributed.Backend))
    values = {(owner, name): value for owner, at in kinds for name, value in vars(at).items()}
    return {key: list(value.items() if isinstance(value, dict) else value)
            for key, value in values.items() if isinstance(value, (list, set, dict))}

def changed(before, after):
    return {(owner, name) for owner, name in before.keys() | after.keys() if not name.startswith("__")
            and before.get((owner, name)) is not after.get((owner, name))}

def keys():
    return [torch._C._dispatch_dump_table(f"aten::{name}")
            for name in ("empty.memory_format", "copy_", "_pin_memory", "is_pinned", "linear", "add.Tensor")]

never = snapshot()
vgpu.enable(2).disable()
before, held, kernels = snapshot(), contents(), keys()
known = {owner for owner, _ in never}
print(sorted(f"{owner}.{name}" for owner, name in changed(never, before) if owner in known))

# The first time leaves what it leaves; later ones leave nothing.
for count in (2, 5):
    vgpu.enable(count)
    assert ("torch.nn.parallel.comm", "scatter") in changed(before, snapshot())
    assert keys() != kernels
    vgpu.disable()
assert not changed(before, snapshot()), changed(before, snapshot())
now = contents()
assert now == held, {key for key, value in held.items() if now[key] != value}
assert keys() == kernels
"""

PERMANENT = {
    # torch.utils.rename_privateuse1_backend works once per process, and names the device type here.
    "class DeviceType.VGPU",
    "class DeviceType.name",
    "class ProfilerActivity.VGPU",
    "class ProfilerActivity.name",
    "torch.utils.backend_registration._privateuse1_backend_name",
    # The name makes torch.accelerator ask torch.vgpu whether it's available; torch.vgpu says no.
    "torch.vgpu",
}


def test_disable_restores_every_replaced_name_except_the_device_types():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    changed = set(ast.literal_eval(done.stdout))
    assert "torch.vgpu" in changed
    assert changed <= PERMANENT


def test_disabled_virtual_gpus_look_like_a_machine_without_a_gpu():
    vgpu.enable(2).disable()
    assert not vgpu.is_enabled()
    assert not torch.vgpu.is_available()
    assert torch.vgpu.device_count() == 0
    assert not torch.accelerator.is_available()
    assert not hasattr(torch.Tensor, "vgpu")
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(1, device="vgpu:0")
    model = torch.nn.DataParallel(torch.nn.Linear(2, 1))
    assert model.device_ids == []
    torch.manual_seed(0)
    torch.utils.data.DataLoader(range(4))


def test_the_context_restores_the_previous_state():
    with vgpu.enable(2, gpu="A100"):
        with vgpu.enable(5, gpu="K80", memory_bytes=2**20) as inner:
            assert len(inner.devices) == 5
            assert torch.vgpu.mem_get_info(4) == (2**20, 2**20)
        assert torch.vgpu.device_count() == 2
        assert "A100" in torch.vgpu.get_device_name(1)
    assert not vgpu.is_enabled()


def test_the_context_restores_the_previous_state_even_after_disable():
    with vgpu.enable(2, gpu="A100"):
        with vgpu.enable(5) as inner:
            inner.disable()
            assert not vgpu.is_enabled()
        assert vgpu.is_enabled()
        assert torch.vgpu.device_count() == 2
        x = torch.ones(3, device="vgpu:1", requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2, 2, 2]
    assert not vgpu.is_enabled()


def test_consecutive_contexts_restore_the_original_state():
    with vgpu.enable(3, gpu="A100"):
        for _ in range(2):
            with vgpu.enable(1, gpu="K80"):
                assert torch.vgpu.device_count() == 1
            assert torch.vgpu.device_count() == 3
            assert "A100" in torch.vgpu.get_device_name(2)


def test_a_tensor_survives_while_fewer_gpus_are_enabled():
    with vgpu.enable(3):
        kept = torch.ones(1000, device="vgpu:2")
        with vgpu.enable(1):
            assert kept.sum().cpu().item() == 1000
        assert torch.vgpu.memory_allocated(2) == 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 0}, "count must be from 1 to 127"),
        ({"count": 128}, "count must be from 1 to 127"),
        ({"count": 1, "gpu": "V1000"}, "no GPU preset 'V1000': use one of K80, V100"),
        ({"count": 1, "memory_bytes": 0}, "memory_bytes must be positive, got 0"),
    ],
)
def test_nonsensical_settings_are_rejected(arguments, words):
    with pytest.raises(ValueError, match=words):
        vgpu.enable(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 4.0}, r"count must be an integer, such as 4; got 4\.0"),
        ({"count": 1, "memory_bytes": "16GiB"}, "memory_bytes must be an integer.*'16GiB'"),
    ],
)
def test_a_non_integer_is_rejected_and_changes_nothing(arguments, words):
    with pytest.raises(TypeError, match=words):
        vgpu.enable(**arguments)
    assert not vgpu.is_enabled()
    with vgpu.enable(1):
        assert torch.vgpu.device_count() == 1
