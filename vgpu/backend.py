"""``vgpu.enable`` and ``vgpu.disable``, which switch virtual GPUs on and off.

Each module in ``_PATCHES`` has a function ``install`` that replaces names in torch; ``enable``
installs all of these patches, and ``disable`` reverts them. Two changes can't be undone, because
torch allows each only once per process: naming the device type, so ``torch.device("vgpu:0")`` stays
valid, and making it the one that ``torch.accelerator`` reports. Tensors that are still on a virtual
GPU keep working. ``torch.vgpu`` stays, too, and reports that no device is available, as
``torch.cuda`` does on a machine without a GPU.
"""

import contextlib
import copyreg
import dataclasses
import operator
from typing import Any

import torch
import torch.nn.parallel.data_parallel
from torch.utils import backend_registration

from vgpu import torch_releases
from vgpu.collectives import dispatch, process_groups
from vgpu.hardware import GPUSpec, Link, get_link, get_spec
from vgpu.memory import gpus, snapshot
from vgpu.tensor import cuda_kernels, kernels, methods, refusals, shapes
from vgpu.time.simulate import simulate
from vgpu.time.steps import Program
from vgpu.time.timeline import Timeline
from vgpu.torch_patches import (
    attention,
    compile,
    data_parallel,
    device_module,
    functions,
    serialization,
)
from vgpu.torch_patches.undo import Changes

_PATCHES = (
    attention,
    compile,
    cuda_kernels,
    data_parallel,
    dispatch,
    functions,
    kernels,
    methods,
    process_groups,
    refusals,
    serialization,
    shapes,
)

_FREE_NAME = "privateuseone"
"""torch's name for its only out-of-tree device type, until it's renamed."""

_changes = Changes()
_Settings = tuple[int, GPUSpec, int]
_settings: _Settings | None = None
_named = False


class Lab(contextlib.AbstractContextManager["Lab"]):
    """The virtual GPUs that ``enable`` switched on; a context manager that undoes the call."""

    def __init__(self, before: _Settings | None) -> None:
        self._before = before
        self.devices = [torch.device(gpus.DEVICE_TYPE, i) for i in range(gpus.device_count())]

    def disable(self) -> None:
        disable()

    def __exit__(self, *exc_info: object) -> None:
        """Restore the state from before ``enable``: other virtual GPUs, or none."""
        _use(self._before)

    def __repr__(self) -> str:
        name = gpus.by_index(0).spec.name if gpus.device_count() else "disabled"
        return f"<{len(self.devices)} virtual GPUs: {name}>"


def enable(
    count: int,
    gpu: str | GPUSpec = "V100",
    memory_bytes: int | None = None,
    link: str | Link | None = None,
) -> Lab:
    """Make ``count`` virtual GPUs available as devices ``vgpu:0`` to ``vgpu:count-1``.

    ``gpu`` is the name of a preset in hardware.py (``vgpu.PRESETS``), or a GPUSpec.
    ``memory_bytes`` overrides the preset's memory per GPU. ``link``, a name in ``vgpu.LINKS`` or a
    Link, overrides its link between GPUs. ``enable`` can be called again at any time; tensors stay
    on the devices that remain. Raises ValueError for a count outside 1 to 127, an unknown preset,
    or a memory size that isn't positive, and TypeError for a non-integer.
    """
    count = _to_int(count, "count", "such as 4")
    if not 1 <= count <= 127:
        raise ValueError(
            f"count must be from 1 to 127 (torch stores a device's index in 8 bits), got {count}"
        )
    spec = get_spec(gpu)
    if link is not None:
        spec = dataclasses.replace(spec, link=get_link(link))
    capacity_bytes = spec.memory_bytes
    if memory_bytes is not None:
        capacity_bytes = _to_int(memory_bytes, "memory_bytes", "such as 16 * 2**30")
    if capacity_bytes <= 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    before = _settings
    _use((count, spec, capacity_bytes))
    return Lab(before)


def _to_int(number: int, name: str, example: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be an integer, {example}; got {number!r}") from None


def prepare() -> None:
    """Do the slowest part of ``enable`` ahead of time, without switching anything on.

    This is for a process from which others are forked: in each of them, ``enable`` then takes a
    tenth of the time.
    """
    if torch._C._get_privateuse1_backend_name() == _FREE_NAME:
        kernels.register_once()


def disable() -> None:
    """Switch virtual GPUs off and restore every name that ``enable`` replaced."""
    _use(None)


def is_enabled() -> bool:
    return _settings is not None


def _use(settings: _Settings | None) -> None:
    """Apply these settings; None switches virtual GPUs off."""
    global _settings
    if settings is not None and _settings is None:
        _name_device_type()
        _install()
    if settings is None and _settings is not None:
        _changes.close()
        snapshot.record_history(None)
        gpus.set_count(0, *_settings[1:])
    if settings is not None:
        gpus.set_count(*settings)
    _settings = settings


def _install() -> None:
    try:
        for owner, name, value in _methods:
            _changes.set(owner, name, value)
        for patch in _PATCHES:
            with torch_releases.noting_missing(_changes.missing):
                patch.install(_changes)
        torch_releases.report_missing(_changes.missing)
    except BaseException:
        _changes.close()
        raise


def _name_device_type() -> None:
    """Set PrivateUse1's name and module, once per process."""
    global _named
    if _named:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != _FREE_NAME:
        raise RuntimeError(
            f"torch supports only one out-of-tree device type (PrivateUse1), and {name!r} already "
            f"uses it: enable virtual GPUs in a process that doesn't load {name!r}"
        )
    methods = {
        owner: set(vars(owner))
        for owner in (torch.Tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence)
    }
    backend_registration._setup_privateuseone_for_python_backend(
        gpus.DEVICE_TYPE, backend_module=device_module, device_guard=gpus.DeviceGuard()
    )
    for owner, names in methods.items():
        for name in set(vars(owner)) - names:
            _methods.append((owner, name, vars(owner)[name]))
            delattr(owner, name)
    kernels.register_once()
    _named = True


def _simulated_again(programs: tuple[Program, ...]) -> Timeline:
    """Name the device type, and simulate programs that were recorded in another process."""
    _name_device_type()
    return simulate(programs)


def _as_programs(timeline: Timeline) -> Any:
    """Pickle a timeline as its programs, to be simulated again after the device type is named.

    Virtual devices can't be unpickled before that.
    """
    if not timeline.programs:
        return timeline.__reduce_ex__(2)
    return _simulated_again, (timeline.programs,)


copyreg.pickle(Timeline, _as_programs)

# Methods that torch generates for a new device type: Tensor.vgpu, Tensor.is_vgpu, Module.vgpu etc.
_methods: list[tuple[Any, str, Any]] = []
