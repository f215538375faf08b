"""The private names of torch that the course relies on exist in this torch."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch
from private_names import listed

import vgpu
from vgpu.torch_patches.undo import Changes

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
LISTED = {name: each for each in listed.RELIANCES for name in each.names}


# In a separate process: torch's test suites change settings of the process that imports them.
LOOK = """
import gc; gc.disable()
import json, os, pkgutil, sys
import torch, torch.distributed.fsdp, torch.distributed.tensor, torch.utils.backend_registration
missing = {}
for name in sys.argv[1:]:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError) as error:
        missing[name] = str(error)
print(json.dumps(missing), flush=True)
os._exit(0)  # taking down all that was imported would take a second
"""

# Changed on import, which other tests in this process may or may not have done.
IMPORTED_LATE = (
    "torch.distributed._symmetric_memory",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
)


@pytest.fixture(scope="module")
def missing():
    done = subprocess.run([sys.executable, "-c", LOOK, *LISTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", LISTED)
def test_every_listed_private_name_exists(name, missing):
    if name in listed.WITHOUT_CUDA and torch.version.cuda is None:
        pytest.skip("PyTorch's CPU builds lack it; lesson 01 creates it temporarily")
    if listed.SINCE.get(name, VERSION) > VERSION:
        pytest.skip(f"came with torch {listed.SINCE[name]}")
    if listed.UNTIL.get(name, VERSION) < VERSION:
        pytest.skip(f"went after torch {listed.UNTIL[name]}")
    needed = LISTED[name]
    assert name not in missing, (
        f"torch {torch.__version__} has no {name} ({missing[name]}). It was needed for "
        f"{needed.purpose}. {needed.without}"
    )


def test_every_name_that_virtual_gpus_replace_is_listed(monkeypatch):
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    replaced = []
    plain = Changes.set

    def set_(self, owner, name, value):
        replaced.append((owner, name))
        plain(self, owner, name, value)

    monkeypatch.setattr(Changes, "set", set_)
    with vgpu.enable(2):
        pass
    assert (torch._C, "_accelerator_getDeviceIndex") in replaced
    names = {f"{owner.__name__}.{name}" for owner, name in replaced if re.match(r"_[a-z]", name)}
    last = {name.rpartition(".")[2] for name in LISTED}
    assert not {name for name in names if name.rpartition(".")[2] not in last}
