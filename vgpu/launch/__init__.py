"""``launch.run`` runs functions from a notebook cell in processes that form a process group."""

from vgpu.launch.failures import LaunchError, RankDied, RankRaised, RanksHung
from vgpu.launch.forkserver import warm_up
from vgpu.launch.launcher import run

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "run", "warm_up"]
