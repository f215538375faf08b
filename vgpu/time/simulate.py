"""Turns steps into a timeline, with new costs (``replay``) or for several ranks (``joined``)."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.time.compiler_passes import in_pieces
from vgpu.time.resources import PendingCollective, Rendezvous
from vgpu.time.simulator import Simulator
from vgpu.time.steps import BeginStream, GroupCollective, Program
from vgpu.time.timeline import Timeline, TraceEvent, in_order


class Deadlock(RuntimeError):
    """Ranks simulated together are waiting for each other, or for one that has finished."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect garbage less often: scanning many long-lived records is wasted work."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def simulate(programs: Sequence[Program]) -> Timeline:
    """Return the timeline of one program, or of multiple ranks' programs (see ``joined``)."""
    return _alone(programs[0]) if len(programs) == 1 else _together(programs)


def replay(timeline: Timeline, **changes: Any) -> Timeline:
    """Simulate the same operations again, with different costs.

    ``changes`` are fields of CostModel by name, such as ``arithmetic_share=0.3``, ``link="PCIe 4"``
    or ``network="Ethernet 100"``; ``gpu``, a preset or a GPUSpec, switches to another GPU, and to
    its link unless the link was chosen separately. Without changes, the new timeline is identical,
    bit for bit.

    Some things stay as recorded: decisions that the program based on times (``stream.query()``),
    races, the attention kernel chosen for the recorded GPU (an older GPU may only have a slower
    one), and which operations were fused. If operations were fused, ``async_tp`` can be changed.
    Raises ValueError for a timeline that wasn't recorded with ``record()``, and for a change of
    ``fuses``.
    """
    if "fuses" in changes:
        raise ValueError(
            "fusion is decided while a program runs, so replay() can't change it: record the "
            "program twice, once with record(fuses=True)"
        )
    if not timeline.programs:
        raise ValueError(
            "this timeline has no recorded steps to replay: use a timeline from record()"
        )
    return simulate([replace(p, costs=p.costs.changed(changes)) for p in timeline.programs])


def replay_beside(timeline: Timeline, others: Iterable[TraceEvent]) -> Timeline:
    """Replay one rank's timeline while earlier collectives are still running on its GPU.

    ``others`` are those collectives; their times are seconds since the start of the timeline, and
    can be negative. Their device is ignored: they can come from the recording of an equivalent
    rank.
    """
    (program,) = timeline.programs
    return _alone(program, others)


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """Join timelines of ranks that were recorded separately, including waits for each other.

    The ranks' clocks start together and synchronize at collectives and messages: each of these
    starts when all of its recorded ranks are ready, and ranks without a recording are assumed to be
    ready, too. So it's enough to record one of several equivalent ranks, but a message needs both
    sender and receiver. The ranks become the timeline's devices, in rank order:
    ``timeline.ranks[k]`` is ``vgpu:k``.

    Raises ValueError if there are no recordings, more than one of the same rank, a rank that used
    multiple GPUs, a message from or to a rank without a recording, or calls that don't match.
    Raises Deadlock, which says where each rank waits, if no rank can continue.
    """
    return _together([program for timeline in timelines for program in timeline.programs])


@rarely_collected()
def _alone(program: Program, others: Iterable[TraceEvent] = ()) -> Timeline:
    simulator = Simulator(program.costs, program.rank)
    simulator.occupy(others, program.gpu)
    simulator.run(in_pieces(program))
    timeline = _timeline([program], program.gpus)
    timeline.events, timeline.host_ranges = in_order(simulator.trace), simulator.host_ranges
    timeline.host_s, timeline.makespan_s = simulator.end()
    timeline.races = [
        replace(race, device=timeline.devices[index]) for index, race in program.races
    ]
    return timeline


def _timeline(programs: Sequence[Program], count: int) -> Timeline:
    return Timeline(
        programs[0].costs.spec.name.removeprefix("Virtual "),
        [torch.device(gpus.DEVICE_TYPE, index) for index in range(count)],
        ranks=[program.rank for program in programs],
        programs=tuple(programs),
    )


# Multiple ranks


@rarely_collected()
def _together(programs: Sequence[Program]) -> Timeline:
    programs = sorted(programs, key=lambda program: program.rank)
    _check(programs)
    rendezvous = Rendezvous(program.rank for program in programs)
    simulators = [
        Simulator(program.costs, program.rank, rendezvous, position)
        for position, program in enumerate(programs)
    ]
    _run_all(
        {
            simulator: simulator.run_beside_others(in_pieces(program))
            for simulator, program in zip(simulators, programs, strict=True)
        }
    )
    timeline = _timeline(programs, len(simulators))
    ends = [simulator.end() for simulator in simulators]
    timeline.host_s, timeline.makespan_s = (max(times) for times in zip(*ends, strict=True))
    timeline.events = in_order(event for simulator in simulators for event in simulator.trace)
    timeline.host_ranges = [each for simulator in simulators for each in simulator.host_ranges]
    for program, device in zip(programs, timeline.devices, strict=True):
        timeline.races += [replace(race, device=device) for _, race in program.races]
    return timeline


def _run_all(runs: dict[Simulator, Iterator[None]]) -> None:
    """Simulate each rank until it has to wait for another, then switch to the next.

    If all ranks reach their collectives in the same order, each rank's steps are simulated in the
    same order as if it were alone. Otherwise, one rank's host runs ahead and launches more.
    """
    going = dict(runs)
    while able := [simulator for simulator in going if not simulator.host_waits]:
        for simulator in [each for each in able if not each.pending] or able[:1]:
            if next(going[simulator], _ENDED) is _ENDED:
                del going[simulator]
            while any([other.wake() for other in runs]):
                pass
    if any(simulator.pending for simulator in runs):
        raise Deadlock(_who_waits(list(runs)))


_ENDED = object()


def _who_waits(simulators: Sequence[Simulator]) -> str:
    lines = ["the joined ranks wait for each other, and none can continue:"]
    for simulator in simulators:
        pending = list(simulator.pending.values())
        arrived = [collective for collective in pending if collective.ready_s is not None]
        what = f"waits in {_named((arrived or pending)[0])}" if pending else "has finished"
        lines.append(f"  rank {simulator.rank} {what}")
    lines.append("All ranks of a group must call the same collectives in the same order.")
    return "\n".join(lines)


def _named(collective: PendingCollective) -> str:
    step = collective.step
    where = f" in {step.by.module}" if step.by.module else ""
    if step.is_message:
        way = "to" if step.name == "send" else "from"
        return f"{step.name} of {step.size_bytes:,} bytes {way} rank {collective.peers[0]}{where}"
    return f"{step.name} of {step.size_bytes:,} bytes among ranks {list(step.ranks)}{where}"


def _check(programs: Sequence[Program]) -> None:
    if not programs:
        raise ValueError("no recordings to join: pass the timeline of at least one rank")
    ranks = [program.rank for program in programs]
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(
            f"there are multiple recordings of rank {twice[0]}: join one per rank (got {ranks})"
        )
    for program in programs:
        used = {step.gpu for step in program.steps if isinstance(step, BeginStream)}
        if len(used) > 1:
            raise ValueError(
                f"rank {program.rank} used {len(used)} GPUs in its recording, but joined ranks "
                "must use one each"
            )
        for step in program.steps:
            if isinstance(step, GroupCollective) and step.is_message:
                lonely = [rank for rank in step.ranks if rank not in ranks]
                if lonely and len(programs) > 1:
                    raise ValueError(
                        f"rank {program.rank} calls {step.name} with rank {lonely[0]}, which has "
                        f"no recording: join one of that rank, too (joined ranks: {ranks})"
                    )
