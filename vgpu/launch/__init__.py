"""Functions of a notebook's cell on several processes with a process group: ``launch.run``."""

from vgpu.launch.errors import LaunchError, RankDied, RankRaised, RanksHung
from vgpu.launch.forkserver import warm_up
from vgpu.launch.launcher import run
from vgpu.launch.rank import report

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "report", "run", "warm_up"]
