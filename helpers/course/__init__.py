"""The course as a whole: its routes, your progress, and its claims (``claims``)."""

from helpers.course.progress import go_on, overview, routes

__all__ = ["go_on", "overview", "routes"]
