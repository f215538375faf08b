"""Exercise checks: ``check("1.2", my_function)`` says right, wrong or not attempted yet."""

from helpers.checks.core import Outcome, check, evaluate, exercises, progress
from helpers.checks.solved import reset

__all__ = ["Outcome", "check", "evaluate", "exercises", "progress", "reset"]
