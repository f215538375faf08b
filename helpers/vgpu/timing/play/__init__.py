"""A recording as a program of steps, and what plays it: one rank, or several that meet."""
