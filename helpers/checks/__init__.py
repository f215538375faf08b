"""Exercise checks and predictions: ``check("1.2", my_function)`` and ``guess("1a", 30)``."""

from helpers.checks.core import Outcome, check, evaluate, exercises, progress
from helpers.checks.guesses import guess
from helpers.checks.records import reset

__all__ = ["Outcome", "check", "evaluate", "exercises", "guess", "progress", "reset"]
