"""Tries every layout of a model on a cluster, and finds the fastest of those that fit.

Each plan is recorded with a few layers and extrapolated. For Llama 70B, that matched the full
model's time and allocated bytes to within 0.01% wherever both were computed. Reserved memory grows
in jumps and can't be extrapolated, so the best plans are also predicted in full.

Layouts are independent, so multiple processes try them in parallel. The processes are forked from
the forkserver of ``launch.run``, which has already imported torch, so this also works in a
notebook, and in a script without ``if __name__ == "__main__"``.
"""

import dataclasses
import functools
import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from tqdm import tqdm

from vgpu.launch import launcher
from vgpu.launch.processes import context, main_module_hidden
from vgpu.plan.layout import RECOMPUTE, Layout
from vgpu.plan.pipelines import predict_if_it_fits
from vgpu.plan.plan import Plan, on_cluster
from vgpu.plan.recorded_step import (
    ExtrapolatedStep,
    Rank,
    RecordedStep,
    Step,
    few_layers,
    with_layers,
)
from vgpu.tables import Table
from vgpu.time.costs import check_count
from vgpu.units import format_bytes

# Calls a function for each task, and yields the tasks' indices and results as they complete.
_Computed = Callable[
    [Callable[..., Any], list[tuple[Any, ...]], dict[str, Any]], Iterator[tuple[int, Any]]
]

_BATCHES = (1, 2, 4, 8, 16, 32, 64)

_STATE_TOO_LARGE = "parameters and optimizer state alone are too large"
_ACTIVATIONS_TOO_LARGE = "activations are too large, according to an estimate"
_ALLOCATED = "allocates more memory than a GPU has"
_RESERVED = "reserves more memory than a GPU has"
_MORE_WORK = "recomputes or regathers, but fits without that"
_SMALLER = "a larger batch fits without more recomputation or regathering"


@dataclasses.dataclass
class Candidate:
    """A plan that was considered, and what is known about it."""

    plan: Plan
    reason: str = ""
    """Why the plan was ruled out; empty if it fits, as far as is known."""
    seconds: float | None = None
    allocated_bytes: int | None = None
    step: Step | None = None
    """Set only for a plan that was predicted in full and fits; time and bytes are the step's."""

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens/s per GPU; None for a plan that wasn't timed."""
        if self.seconds is None:
            return None
        return self.plan.tokens / self.plan.layout.ranks / self.seconds

    @property
    def reserved_bytes(self) -> int | None:
        return None if self.step is None else self.step.reserved_bytes


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """All plans of a search.

    When printed, it shows the ten best, and why the others were ruled out.
    """

    candidates: list[Candidate]

    @property
    def best(self) -> list[Candidate]:
        """The plans that fit, fastest first; only those with a ``step`` are certain to fit."""
        fitting = [one for one in self.candidates if not one.reason]
        return sorted(fitting, key=lambda one: -(one.tokens_per_s or 0))

    @property
    def reasons(self) -> dict[str, int]:
        """Why the other plans were ruled out, with the number of plans for each reason."""
        return dict(Counter(one.reason for one in self.candidates if one.reason).most_common())

    def __str__(self) -> str:
        best, rows = self.best, []
        for one in best[:10]:
            assert one.allocated_bytes is not None
            rows.append(
                (
                    str(one.plan.layout),
                    one.plan.batch,
                    one.plan.recompute,
                    "twice" if one.plan.reshard_after_forward else "once",
                    f"{one.tokens_per_s:,.0f}",
                    format_bytes(one.allocated_bytes),
                    format_bytes(one.reserved_bytes) if one.reserved_bytes else "not tried",
                )
            )
        header = "layout, batch, recompute, gathered, tokens/s per GPU, allocated, reserved"
        table = Table(header.split(", "), rows)
        others = Table(("why the others were ruled out", "plans"), list(self.reasons.items()))
        head = f"{len(best)} of {len(self.candidates)} plans fit."
        return "\n\n".join([head, *([str(table)] if rows else []), str(others)])


def search(
    plan: Plan, sequences: int | None = None, processes: int | None = None, **costs: Any
) -> SearchResult:
    """Find all valid plans for the model, GPUs and network of ``plan``, and their speed.

    Layout, batch, recomputation and ``reshard_after_forward`` are searched; ``cp`` and ``ep`` stay
    as they are. Batches are powers of two, and ``sequences`` is the maximum per step, across all
    GPUs. Starting with the fastest, plans are predicted in full, two at a time, until the fastest
    one fits. ``processes`` is the number of processes that try layouts, by default as many as cores
    and memory allow; it doesn't affect the result. ``costs`` are as for ``predict``. The ``tp``
    ranks are neighbors within one host; neither gradient accumulation nor pipelines are tried.
    Raises ValueError for a plan with a pipeline, for fewer than one process, and for fewer
    sequences than any layout needs. Raises RuntimeError if a process dies.
    """
    for name, count in (("sequences", sequences), ("processes", processes)):
        if count is not None:
            check_count(name, count)
    if plan.layout.pp > 1:
        raise ValueError(
            f"a search doesn't try pipelines, and this layout has pp = {plan.layout.pp}: leave it "
            "out, or predict plans with pipelines one by one"
        )
    plan, costs = plan.taking(costs)
    candidates = [Candidate(other) for other in _plans(plan, sequences)]
    if not candidates:
        least = min(other.layout.dp for other in _plans(plan, None))
        raise ValueError(
            f"no layout of {plan.layout.ranks} GPUs works with only {sequences} sequences per "
            f"step: use at least {least}, one per data-parallel rank"
        )
    for one in candidates:
        one.reason = _too_large_on_paper(one.plan, bool(costs.get("fuses")))
    left = [one for one in candidates if not one.reason]
    groups = [list(group) for _, group in itertools.groupby(left, key=lambda one: one.plan.layout)]
    groups.sort(key=len, reverse=True)  # so that no process starts the longest one last
    result = SearchResult(candidates)
    # One layout per process, then two plans in full.
    processes = min(processes or at_once(), max(len(groups), 2))
    with (
        tqdm(desc="trying layouts", total=len(left), leave=False, unit="plan") as bar,
        _workers(processes) as computed,
    ):
        _try(groups, costs, computed, bar)
        _confirm(result, costs, computed, bar)
    return result


def _plans(plan: Plan, sequences: int | None) -> Iterator[Plan]:
    cp = plan.layout.cp
    ranks = plan.layout.ranks // cp
    divisors = [parts for parts in range(1, ranks + 1) if ranks % parts == 0]
    for tp, dp_replicate in itertools.product(
        range(1, min(plan.gpus_per_host, ranks) + 1), divisors
    ):
        if ranks % (dp_replicate * tp):
            continue
        try:
            layout = Layout(
                dp_replicate, ranks // (dp_replicate * tp), tp, cp=cp, ep=plan.layout.ep
            )
        except ValueError:  # the number of shards isn't divisible by ep
            continue
        batches = [n for n in reversed(_BATCHES) if sequences is None or n * layout.dp <= sequences]
        gathers = (False, True) if layout.shards > 1 else (True,)
        for batch, recompute, again in itertools.product(batches, RECOMPUTE, gathers):
            changes: dict[str, Any] = {"recompute": recompute, "reshard_after_forward": again}
            try:
                other = dataclasses.replace(plan, layout=layout, batch=batch, **changes)
            except ValueError:  # heads may not be divisible, or hosts not filled
                continue
            yield other


def _too_large_on_paper(plan: Plan, compiled: bool) -> str:
    capacity = plan.spec.memory_bytes
    if plan.least_state_bytes > capacity:
        return _STATE_TOO_LARGE
    return _ACTIVATIONS_TOO_LARGE if plan.least_bytes(compiled) > capacity else ""


def _tried(group: list[Candidate], **costs: Any) -> list[Candidate]:
    """Try the plans of one layout; they share two models with a few layers."""
    plan = group[0].plan
    few: tuple[int, ...] = few_layers(plan)
    if plan.sizes.layers <= few[1]:
        few = (plan.sizes.layers,)
    with on_cluster(plan):
        compiled = bool(costs.get("fuses"))
        ranks = {n: Rank(with_layers(plan, n), False, compiled) for n in few}
        for number, one in enumerate(group):
            if one.reason or one.seconds is not None:
                continue
            one.reason = _known(one.plan, group[:number])
            if not one.reason:
                _predict_from_few(one, ranks, costs)
    return group


def _known(plan: Plan, earlier: list[Candidate]) -> str:
    """Return why other plans of the same layout rule out a plan, or "" if they don't.

    This assumes that recomputing and regathering less takes at least as much memory and at most as
    much time, and that a larger batch takes more memory and less time per token.
    """
    for one in earlier:
        other = one.plan
        if other.batch <= plan.batch and _works_no_more(plan, other) and one.reason == _ALLOCATED:
            return _ALLOCATED
        if other.batch >= plan.batch and _works_no_more(other, plan) and not one.reason:
            return _MORE_WORK if other.batch == plan.batch else _SMALLER
    return ""


def _works_no_more(plan: Plan, other: Plan) -> bool:
    """Whether a plan recomputes and regathers no more than another."""
    again, other_again = (
        (RECOMPUTE.index(p.recompute), p.reshard_after_forward) for p in (plan, other)
    )
    return again[0] <= other_again[0] and again[1] <= other_again[1]


def _predict_from_few(one: Candidate, ranks: dict[int, Rank], costs: dict[str, Any]) -> None:
    plan, compiled, steps = one.plan, bool(costs.get("fuses")), list[RecordedStep]()
    for layers, rank in ranks.items():
        few = with_layers(plan, layers)
        steps.append(rank.recorded(few, **costs))
        # While blocks keep the most, the missing layers add at least this.
        added_bytes = plan.least_bytes(compiled) - few.least_bytes(compiled)
        if sum(steps[-1].peaks[2].values()) + added_bytes > plan.spec.memory_bytes:
            one.reason = _ALLOCATED
            return
    if len(steps) == 1:  # a small model was recorded with all of its layers
        one.seconds, one.allocated_bytes = steps[0].seconds, steps[0].allocated_bytes
    else:
        step = ExtrapolatedStep(plan, (steps[0], steps[1]))
        one.seconds = step.seconds()
        one.allocated_bytes = int(sum(step.bytes_by_cause.values()))
    if one.allocated_bytes > plan.spec.memory_bytes:
        one.reason = _ALLOCATED


def _confirm(result: SearchResult, costs: dict[str, Any], computed: _Computed, bar: Any) -> None:
    """Predict plans in full, the two fastest in parallel, until the fastest one fits."""
    while (best := result.best) and best[0].step is None:
        unsure = [one for one in best[:2] if one.step is None]
        bar.total += len(unsure)
        tasks = [(one.plan,) for one in unsure]
        for number, step in computed(predict_if_it_fits, tasks, costs):
            one = unsure[number]
            if step is None:
                one.reason = _RESERVED
            else:
                one.step, one.seconds = step, step.seconds
                one.allocated_bytes = step.allocated_bytes
            bar.update()
        for one in unsure:
            if one.reason:
                _try_left_out(one, result, costs, computed, bar)


def _try_left_out(
    refused: Candidate, result: SearchResult, costs: dict[str, Any], computed: _Computed, bar: Any
) -> None:
    """Try the plans that were skipped because another plan seemed to fit, but didn't."""
    group = [one for one in result.candidates if one.plan.layout == refused.plan.layout]
    for other in group:
        if other.reason in (_MORE_WORK, _SMALLER) and other.plan.batch <= refused.plan.batch:
            other.reason = ""
    if any(other.seconds is None and not other.reason for other in group):
        bar.total += len(group)
        _try([group], costs, computed, bar)


# Multiple processes

WORKER_BYTES = 2**30
"""Free memory per process; 80 layers take a tenth of that, or half if torch isn't shared."""


def at_once() -> int:
    """Return how many processes this machine's cores and free memory allow, at least 1."""
    free_bytes = psutil.virtual_memory().available
    return max(1, min(launcher.cores(), free_bytes // WORKER_BYTES))


def _try(
    groups: list[list[Candidate]], costs: dict[str, Any], computed: _Computed, bar: Any
) -> None:
    """Compute the time and bytes of plans; the plans in a group have the same layout."""
    for number, tried in computed(_tried, [(group,) for group in groups], costs):
        for one, result in zip(groups[number], tried, strict=True):
            vars(one).update(vars(result))
        bar.update(len(tried))


@contextmanager
def _workers(processes: int) -> Iterator[_Computed]:
    """Provide a function that calls others in up to ``processes`` processes, or in this one."""
    if processes == 1:
        yield lambda function, tasks, costs: (
            (number, function(*task, **costs)) for number, task in enumerate(tasks)
        )
        return
    starts = context()
    # Nothing is written to this pipe: workers exit once it's closed, or its only writer is gone.
    reader, writer = starts.Pipe(duplex=False)
    with reader, writer, ProcessPoolExecutor(processes, starts, _begin, (reader,)) as pool:
        try:
            yield functools.partial(_in_pool, pool)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process died while predicting plans, perhaps for lack of memory "
                f"({format_bytes(psutil.virtual_memory().available)} is free now): pass "
                "processes=1 to predict all plans in this process"
            ) from error
        except BaseException:
            writer.close()  # so that all workers exit
            raise


def _in_pool(
    pool: ProcessPoolExecutor,
    function: Callable[..., Any],
    tasks: list[tuple[Any, ...]],
    costs: dict[str, Any],
) -> Iterator[tuple[int, Any]]:
    with main_module_hidden():
        number_of = {
            pool.submit(function, *task, **costs): number for number, task in enumerate(tasks)
        }
    for future in as_completed(number_of):
        yield number_of[future], future.result()


def _begin(reader: Connection) -> None:
    """Set up a worker: compute with one thread, and exit once ``reader`` no longer has a writer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl+C
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(reader,), daemon=True).start()


def _end_with(reader: Connection) -> None:
    with suppress(EOFError, OSError):
        reader.recv_bytes()
    os._exit(1)
