"""The suites that ship inside torch, and how much of them a run takes.

``TESTS=whole`` in the environment takes every sample of every entry (minutes), as the public CI
does. ``make test`` takes a third of each operator's, module's and optimizer's entries, the same ones
each time, and of each its first few samples.
"""

import itertools
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from sampling import WHOLE

with warnings.catch_warnings():
    # hypothesis is missed there, and needed only for tests that are not used here.
    warnings.simplefilter("ignore", ImportWarning)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
    from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db
    from torch.testing._internal.common_optimizers import (
        _get_optim_inputs_including_global_cliquey_kwargs as optimizer_inputs,
    )
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# torch's test utilities forbid torch.backends.cudnn.benchmark = ... for the rest of the process;
# the tests that share it may do so.
torch.backends.__allow_nonbracketed_mutation_flag = True

__all__ = [
    "ModuleInfo",
    "ModuleInput",
    "OpInfo",
    "OptimizerInfo",
    "OptimizerInput",
    "SampleInput",
    "check_share",
    "first",
    "marked",
    "module_db",
    "op_db",
    "optim_db",
    "optimizer_inputs",
    "third",
]


def first(count: int, samples: Iterable) -> Iterable:
    """The first ``count`` samples, or all in a full run."""
    return samples if WHOLE else itertools.islice(samples, count)


def third(entries: dict[str, Any], kind: Callable[[Any], str]) -> dict[str, Any]:
    """A third of the entries of each kind, rounded up; all in a full run.

    A checksum of the name decides, so that it is the same third everywhere. What names end in, a
    dtype, layout or mode, is in it at least once.
    """
    if WHOLE:
        return entries
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        kinds[kind(entry)].append(name)
    taken = set()
    for names in kinds.values():
        names.sort(key=lambda name: zlib.crc32(name.encode()))
        taken.update(names[: -(-len(names) // 3)])
    endings = {name.rpartition("-")[2] for name in taken}
    for name in entries:
        if (ending := name.rpartition("-")[2]) not in endings:
            taken.add(name)
            endings.add(ending)
    return {name: entry for name, entry in entries.items() if name in taken}


def marked(entries: dict[str, Any], exceptions: dict[str, str]) -> list:
    """Parameters for pytest: an exception must still disagree, and its reason is shown."""
    return [
        pytest.param(
            entry,
            id=name,
            marks=[pytest.mark.xfail(strict=True, reason=exceptions[name])]
            if name in exceptions
            else [],
        )
        for name, entry in entries.items()
    ]


def check_share(entries: dict[str, Any], exceptions: dict[str, str]) -> None:
    """At least 99 of 100 entries agree; each exception is one of them, and has its reason."""
    assert exceptions.keys() <= entries.keys()
    assert len(exceptions) <= len(entries) / 100, f"{len(exceptions)} of {len(entries)} disagree"
    assert all(len(reason) > 20 for reason in exceptions.values())
