"""Functions of a notebook's cell on several processes with a process group: ``launch.run``."""

from helpers.launch.errors import LaunchError, RankDied, RankRaised, RanksHung
from helpers.launch.launcher import run
from helpers.launch.rank import report
from helpers.launch.team import warm_up

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "report", "run", "warm_up"]
