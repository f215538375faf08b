"""Figures of the lessons; they only read records."""

from helpers.plots.shares import shares
from helpers.plots.style import COLOURS, figure

__all__ = ["COLOURS", "figure", "shares"]
