"""The course's own package: checks, progress, widgets, plots, devices and data."""
