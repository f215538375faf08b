"""Ways to train on several ranks, each the same few steps on whatever device type is asked for.

Every way is called on each rank as ``way(rank, world_size, device_type)`` with a process group in
place. It returns what must not depend on the device type: losses, norms and parameters, as CPU
tensors.
"""

from strategies.training import beside_one_process
from strategies.ways import WAYS, both

__all__ = ["WAYS", "beside_one_process", "both"]
