"""A transformer cut into the stages of a pipeline, as torchtitan cuts it.

The embedding and the output count as a layer each, and what is left over goes to the stages in
front. So Llama 405B, whose 126 layers do not divide by 8, has 15 layers in its first and last of 8
stages and 16 in the others. Source: ``_generate_llm_fqn_per_model_part`` in
torchtitan/distributed/pipeline_parallel.py; the version of December 2024, ``generate_split_points``,
gives the same stages there.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import nn

from vgpu.plan.transformer import Transformer, TransformerSizes


class Part(NamedTuple):
    """What a stage has of a transformer."""

    layers: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the last norm and the output."""


def parts(layers: int, stages: int) -> list[Part]:
    """The stages of a transformer of so many layers. ValueError for more stages than layers."""
    if stages > layers:
        raise ValueError(
            f"{stages} stages of a pipeline are too many for a model of {layers} layers: at most "
            f"{layers}"
        )
    if stages == 1:
        return [Part(layers, True, True)]
    each, left = divmod(layers + 2, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return [Part(n, stage == 0, stage == stages - 1) for stage, n in enumerate(counts)]


class Stage(nn.Module):
    """A part of a transformer, for sequences of exactly ``sizes.sequence`` tokens.

    (B, S) integers in for the first stage, else (B, S, width); (B, S, vocabulary) logits out of the
    last stage, else (B, S, width). Where ranks share tensors, S between stages is a rank's part.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: TransformerSizes, part: Part) -> None:
        super().__init__()
        whole = Transformer(dataclasses.replace(sizes, layers=part.layers))
        self.embedding = whole.embedding if part.first else None
        self.blocks = whole.blocks
        self.norm = whole.norm if part.last else None
        self.output = whole.output if part.last else None
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        for block in self.blocks:
            hidden = block(hidden, self.cos, self.sin)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))
