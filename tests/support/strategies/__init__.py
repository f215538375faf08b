"""Ways to train on multiple ranks, each for the same few steps on the requested device type.

Every way is called on each rank as ``way(rank, world_size, device_type)``, with an existing process
group. It returns what must not depend on the device type: losses, norms and parameters, as CPU
tensors.
"""

import warnings

import torch

from strategies import data, pipelines, sharded, tensors
from strategies.training import beside_one_process

__all__ = ["WAYS", "beside_one_process", "both"]

WAYS = {
    "data": data.WAYS,
    "sharded": sharded.WAYS,
    "tensors": tensors.WAYS,
    "pipelines": pipelines.WAYS,
}
"""Grouped by what is split; the ways in a group run on the same ranks, one after another."""


def both(rank, world_size, ways):
    """Return each way's results on the CPU, and on this rank's GPU, real or virtual."""
    found = {}
    for way in ways:
        results = []
        for device_type in ("cpu", torch.accelerator.current_accelerator().type):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(way(rank, world_size, device_type))
        found[way.__name__] = results
    return found
