"""Judging what learners handed in: each answer in a process of its own, within limits."""
