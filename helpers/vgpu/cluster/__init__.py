"""A cluster that does not exist: PyTorch's own parallel code as one of its ranks, in virtual time."""

from helpers.vgpu.cluster.layout import Cluster, cluster

__all__ = ["Cluster", "cluster"]
