"""Functions of a notebook's cell on several processes with a process group: ``launch.run``."""

from helpers.forkserver import warm_up
from helpers.launch.errors import LaunchError, RankDied, RankRaised, RanksHung
from helpers.launch.launcher import run
from helpers.launch.rank import report

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "report", "run", "warm_up"]
