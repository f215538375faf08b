"""Figures of models that are split or shared over GPUs."""
