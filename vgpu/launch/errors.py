"""What ``launch.run`` raises when it has no results to return."""


class LaunchError(RuntimeError):
    """``launch.run`` has no results to return; the message says which rank, what and where."""


class RankRaised(LaunchError):
    """A rank raised an exception, left through ``sys.exit``, or returned what cannot be sent.

    ``__cause__`` is the rank's own exception if that can be pickled.
    """


class RankDied(LaunchError):
    """A rank's process ended without an exception: by a signal or with an exit code."""


class RanksHung(LaunchError):
    """Not every rank returned within the time that it was given."""
