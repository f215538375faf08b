"""Operators that torch has for GPUs only, computed on the CPU."""
