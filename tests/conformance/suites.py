"""The test suites that ship with torch, and how much of each is run.

``make test`` runs the first few samples of every third entry, ``make test-all`` every sample of
every entry, which takes minutes.
"""

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from levels import ALL

with warnings.catch_warnings():
    # They warn if hypothesis is missing, but only tests that aren't used here need it.
    warnings.simplefilter("ignore", ImportWarning)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
    from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db
    from torch.testing._internal.common_optimizers import (
        _get_optim_inputs_including_global_cliquey_kwargs as optimizer_inputs,
    )
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# torch's test utilities forbid torch.backends.cudnn.benchmark = ... for the rest of the process,
# but other tests may need to set it.
torch.backends.__allow_nonbracketed_mutation_flag = True

__all__ = [
    "ModuleInfo",
    "ModuleInput",
    "OpInfo",
    "OptimizerInfo",
    "OptimizerInput",
    "SampleInput",
    "first",
    "marked",
    "module_db",
    "op_db",
    "optim_db",
    "optimizer_inputs",
    "sampled",
]


def first(count: int, samples: Iterable) -> Iterable:
    """Return the first ``count`` samples, or all of them under ``make test-all``."""
    return samples if ALL else itertools.islice(samples, count)


def sampled(entries: dict[str, Any]) -> dict[str, Any]:
    """Return every third entry, or all of them under ``make test-all``."""
    return entries if ALL else dict(itertools.islice(entries.items(), 0, None, 3))


def marked(entries: dict[str, Any], exceptions: dict[str, str]) -> list:
    """Return pytest parameters; an exception must still differ, and shows its reason."""
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
