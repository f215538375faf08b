"""Autocast for virtual GPUs: what runs in which type, as for CUDA."""
