"""Ranks with virtual GPUs: process groups for their tensors, and DTensors that wrap them."""
