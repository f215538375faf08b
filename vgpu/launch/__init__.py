"""Run functions from a notebook cell on several processes with a process group: ``launch.run``."""

from vgpu.launch.failures import LaunchError, RankDied, RankRaised, RanksHung
from vgpu.launch.forkserver import warm_up
from vgpu.launch.launcher import run

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "run", "warm_up"]
