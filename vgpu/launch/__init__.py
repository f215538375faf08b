"""``launch.run`` runs functions from a notebook cell in processes that form a process group."""

from vgpu.launch.launcher import LaunchError, RankDied, RankRaised, RanksHung, run
from vgpu.launch.processes import start_forkserver as warm_up

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "run", "warm_up"]
