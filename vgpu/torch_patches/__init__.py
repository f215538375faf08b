"""Replacements for names in torch while virtual GPUs are enabled."""
