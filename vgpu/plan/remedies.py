"""What to change in a plan that does not fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from vgpu.plan.rank import predict
from vgpu.plan.step import CHECKPOINTS, Plan, Step
from vgpu.tables import Table
from vgpu.units import format_bytes


def remedies(step: Step, costs: dict[str, Any]) -> str:
    """Changes that make it fit, fastest first, each tried on the cluster; text to print.

    If no single one does, each is tried together with full checkpointing, then also with parameters
    that are gathered again.
    """
    for given, plan in _keeping_less(step.plan):
        tried = [
            (f"{given} {text}".strip(), predict(other, **costs))
            for text, other in tqdm(list(_changes(plan)), desc="looking for what fits", leave=False)
        ]
        rows = [
            (text, format_bytes(other.reserved_bytes), f"{other.tokens_per_s:,.0f}")
            for text, other in sorted(tried, key=lambda one: -one[1].tokens_per_s)
            if other.fits
        ]
        if rows:
            return str(Table(("what would fit", "reserved", "tokens/s a GPU"), rows))
    return (
        "None of what was tried makes it fit: smaller batches, more sharing, checkpoints, parameters "
        "gathered again. Use more GPUs."
    )


def _keeping_less(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan, then with what it lacks of all that keeps less: one option, then both."""
    yield "", plan
    given = []
    if plan.checkpoint != CHECKPOINTS[-1]:
        plan = dataclasses.replace(plan, checkpoint=CHECKPOINTS[-1])
        given.append(f"--checkpoint {plan.checkpoint}")
        yield " ".join(given), plan
    if not plan.reshard_after_forward:
        given.append("--reshard-after-forward")
        yield " ".join(given), dataclasses.replace(plan, reshard_after_forward=True)


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for how in CHECKPOINTS[CHECKPOINTS.index(plan.checkpoint) + 1 :]:
        yield f"--checkpoint {how}", dataclasses.replace(plan, checkpoint=how)
    if plan.layout.shards > 1 and not plan.reshard_after_forward:
        yield "--reshard-after-forward", dataclasses.replace(plan, reshard_after_forward=True)
    yield from _spread(plan)


def _spread(plan: Plan) -> Iterator[tuple[str, Plan]]:
    layout = plan.layout
    count = plan.schedule.micro_batches if layout.stages > 1 else 1
    if plan.batch // 2 and plan.batch // 2 % count == 0:
        half = plan.batch // 2
        yield f"--batch {half}", dataclasses.replace(plan, batch=half)
    if layout.stages > 1 and plan.batch % (2 * count) == 0:
        yield f"--micro-batches {2 * count}", dataclasses.replace(plan, micro_batches=2 * count)
    if layout.replicas > 1:
        whole = layout.replicas * layout.shards
        divided = dataclasses.replace(layout, replicas=1, shards=whole)
        yield f"--replicas 1 --shards {whole}", dataclasses.replace(plan, layout=divided)
    for by in (2, 4, 8):
        if layout.shards % by or layout.tensors * by > plan.gpus_per_host:
            continue
        shared = dataclasses.replace(
            layout, shards=layout.shards // by, tensors=layout.tensors * by
        )
        try:
            # Ranks that had samples of their own now share a layer and all of their samples.
            other = dataclasses.replace(plan, layout=shared, batch=plan.batch * by)
        except ValueError:
            continue  # the model's heads do not divide so
        text = f"--shards {shared.shards} --tensors {shared.tensors} --batch {other.batch}"
        yield text, other
