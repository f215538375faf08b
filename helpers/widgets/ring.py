"""Explorer for lesson 06's ring all-reduce, step by step, with at most one rank per color."""

from dataclasses import dataclass

import ipywidgets
import torch

from helpers.plots.collectives import ring
from helpers.plots.style import RANK_COLORS
from helpers.widgets.live import explorer

MOST_RANKS = len(RANK_COLORS)


@dataclass(frozen=True)
class RingState:
    """Every rank's data after a step of the ring.

    ``held[rank][chunk]`` is a number whose digits show which ranks contributed to it;
    ``sent[rank]`` is the chunk that the rank sent to rank + 1 in this step. In state 0, nothing has
    been sent.
    """

    held: list[list[int]]
    sent: list[int]


def ring_states(ranks: int) -> list[RingState]:
    """Return a ring all-reduce's states: the start, then one after each of 2 * (ranks - 1) steps.

    Rank r starts with 1, 2, 3, ... times 10**r, one number per chunk. There are at most
    ``MOST_RANKS`` ranks, the number of colors.
    """
    held = torch.stack([torch.arange(1, ranks + 1) * 10**rank for rank in range(ranks)])
    states = [RingState(held.tolist(), [])]
    for step in range(2 * (ranks - 1)):
        sent = [(rank - step) % ranks for rank in range(ranks)]
        # Read everything before writing anything: in a real ring, all ranks send at the same time.
        on_the_way = [held[rank, chunk].clone() for rank, chunk in enumerate(sent)]
        for rank, (chunk, number) in enumerate(zip(sent, on_the_way, strict=True)):
            right = (rank + 1) % ranks
            if step < ranks - 1:
                held[right, chunk] += number
            else:
                held[right, chunk] = number
        states.append(RingState(held.tolist(), sent))
    return states


def describe_step(ranks: int, step: int) -> str:
    """Describe the ring after ``step`` steps, and what each rank has sent so far."""
    last = 2 * (ranks - 1)
    if step == 0:
        return f"At the start, every rank holds {ranks} chunks of its own."
    phase = "was added" if step < ranks else "replaced what was there"
    text = f"Step {step} of {last}: each rank sent one chunk to the next rank, where it {phase}."
    text += f"\nSent so far by each rank: {step}/{ranks} of a tensor."
    if step == ranks - 1:
        text += "\nEach rank now holds one complete chunk: a reduce-scatter is done."
    if step == last:
        text += "\nEvery chunk is complete everywhere: the all-reduce is done."
    return text


def show_ring(ranks: int, step: int) -> None:
    """Draw the ring after ``step`` steps and say what happened; steps past the end show the end."""
    states = ring_states(ranks)
    step = max(0, min(step, len(states) - 1))
    state = states[step]
    ring(state.held, state.sent, f"{ranks} ranks, after step {step}")
    print(describe_step(ranks, step))


def ring_explorer() -> ipywidgets.Widget:
    """Return sliders for ``show_ring``: the number of ranks, and the step."""
    ranks = ipywidgets.IntSlider(4, min=2, max=MOST_RANKS, description="ranks")
    step = ipywidgets.IntSlider(0, min=0, max=2 * (ranks.value - 1), description="step")

    def fit_steps(change: dict[str, int]) -> None:
        step.max = 2 * (change["new"] - 1)

    ranks.observe(fit_steps, "value")
    # Steps past the end show the end, so the same values work for fewer ranks.
    few = {"ranks": (2, 3, 4), "step": range(7)}
    return explorer(show_ring, {"ranks": ranks, "step": step}, few)
