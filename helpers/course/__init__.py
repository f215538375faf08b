"""The course about itself: its routes and how far you are, and what it claims (``claims``)."""

from helpers.course.progress import go_on, overview, routes

__all__ = ["go_on", "overview", "routes"]
