"""Recordings played again: with another GPU or network, or several ranks together."""

import copyreg
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from vgpu.memory import gpus
from vgpu.time.async_tp import in_pieces
from vgpu.time.gc_paused import rarely_collected
from vgpu.time.rendezvous import Meeting, Part
from vgpu.time.simulator import Player
from vgpu.time.steps import Collective, Program, Stream
from vgpu.time.trace import Timeline, TraceEvent, in_order

SHOW_PROGRESS_FROM = 300_000
"""Steps that play in about a second; from here on a bar shows how far they are."""


class Deadlock(RuntimeError):
    """Ranks that play together wait for one another, or for one that has ended."""


def replay(timeline: Timeline, **changes: Any) -> Timeline:
    """The same operations again, timed anew: what one more run of the program would give.

    changes: fields of CostModel by name, such as ``arithmetic_share=0.3``, ``link="PCIe 4"`` or
    ``network="Ethernet 100"``; ``gpu``, a preset or a GPUSpec, for another kind of GPU, with its own
    link unless one was given. Without changes the timeline comes out as it was, to the last bit.

    What the program itself decided by the time (``stream.query()``) stays as it was recorded, and
    so do races, the kernel that attention took on the GPU of the recording (an older one may have
    only a slower one), and which operations were fused; ``async_tp`` may change where they were.
    ValueError for a timeline that no ``record()`` made.
    """
    if "fuses" in changes:
        raise ValueError(
            "what is fused is decided while a program runs: call record(fuses=...) for a timeline "
            "with and one without"
        )
    if not timeline.programs:
        raise ValueError(
            "this timeline has no recorded steps to replay: record() makes one that has"
        )
    programs = [replace(p, model=p.model.changed(changes)) for p in timeline.programs]
    return _played(programs)


def replay_beside(timeline: Timeline, others: Iterable[TraceEvent]) -> Timeline:
    """What one rank did again, while collectives of its GPU go on that were begun before.

    others: their times are seconds since the timeline began, and may be less than 0. Their device
    does not count: they may be recordings of a rank that does the same.
    """
    (program,) = timeline.programs
    return _alone(program, others)


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of ranks that each made a recording, with what they wait for one another.

    Their clocks begin together and meet in collectives and messages: each starts when all of its
    ranks that are here are ready, and ranks that are not here are taken to be ready with them. So
    it suffices to record one rank of those that do the same; but a message needs both its ends.
    The ranks are the timeline's devices, in order of rank: ``timeline.ranks[k]`` is ``vgpu:k``.

    ValueError for no or several recordings of a rank, for a message from or to a rank without a
    recording, and for calls that do not match. Deadlock names who waits for whom.
    """
    return together([program for timeline in timelines for program in timeline.programs])


def rebuilt(programs: tuple[Program, ...]) -> Timeline:
    """The timeline of programs that came from another process."""
    _name_device_type()
    return _played(programs)


def _as_programs(timeline: Timeline) -> Any:
    """Devices stay in their process. Steps can travel, and give the same timeline again."""
    if not timeline.programs:
        return timeline.__reduce_ex__(2)
    return rebuilt, (timeline.programs,)


copyreg.pickle(Timeline, _as_programs)


def _not_ready() -> None:
    raise AssertionError("vgpu.backend names the device type, and is not imported")


_name_device_type: Callable[[], None] = _not_ready


def name_with(name_device_type: Callable[[], None]) -> None:
    """Let ``name_device_type`` make ``torch.device("vgpu:0")`` valid in this process."""
    global _name_device_type
    _name_device_type = name_device_type


@rarely_collected()
def _played(programs: Sequence[Program]) -> Timeline:
    return _alone(programs[0]) if len(programs) == 1 else together(programs)


def _alone(program: Program, others: Iterable[TraceEvent] = ()) -> Timeline:
    player, steps = Player(program.model, program.rank), in_pieces(program)
    player.take_up(others, program.gpu)
    with _bar(len(steps)) as bar:
        for _ in player.play(_counted(steps, bar)):
            raise AssertionError("a rank alone waits for nobody")
    timeline = _timeline([program], program.gpus)
    timeline.events = in_order(player.events)
    timeline.host_s, timeline.makespan_s = player.end()
    timeline.races = [
        replace(race, device=timeline.devices[index]) for index, race in program.races
    ]
    return timeline


def _timeline(programs: Sequence[Program], count: int) -> Timeline:
    return Timeline(
        programs[0].model.spec.name.removeprefix("Virtual "),
        [torch.device(gpus.DEVICE_TYPE, index) for index in range(count)],
        ranks=[program.rank for program in programs],
        programs=tuple(programs),
    )


def _bar(total: int) -> Any:
    hidden = total < SHOW_PROGRESS_FROM
    return tqdm(desc="replaying", total=total, leave=False, disable=hidden, unit="step")


def _counted(steps: Sequence[Any], bar: Any) -> Iterator[Any]:
    for number, step in enumerate(steps):
        if number % 10_000 == 9_999:
            bar.update(10_000)
        yield step


# Several ranks


@rarely_collected()
def together(programs: Sequence[Program]) -> Timeline:
    """What ``joined`` gives for these programs."""
    programs = sorted(programs, key=lambda program: program.rank)
    _check(programs)
    meeting = Meeting(program.rank for program in programs)
    players = [
        Player(program.model, program.rank, meeting, place)
        for place, program in enumerate(programs)
    ]
    steps = [in_pieces(program) for program in programs]
    with _bar(sum(map(len, steps))) as bar:
        _play(
            {
                player: player.play(_counted(of_rank, bar))
                for player, of_rank in zip(players, steps, strict=True)
            }
        )
    timeline = _timeline(programs, len(players))
    ends = [player.end() for player in players]
    timeline.host_s, timeline.makespan_s = (max(times) for times in zip(*ends, strict=True))
    timeline.events = in_order(event for player in players for event in player.events)
    for program, device in zip(programs, timeline.devices, strict=True):
        timeline.races += [replace(race, device=device) for _, race in program.races]
    return timeline


def _play(playing: dict[Player, Iterator[None]]) -> None:
    """Let each rank go on until it waits for another, and the next ones meanwhile.

    So a rank's steps come in their own order, as if it were alone, wherever the ranks come to their
    collectives in one order. Where they do not, one of them looks ahead: its host hands over more.
    """
    going = dict(playing)
    while able := [player for player in going if not player.host_waits]:
        for player in [player for player in able if not player.outstanding] or able[:1]:
            if next(going[player], _ENDED) is _ENDED:
                del going[player]
            while any([other.wake() for other in playing]):
                pass
    if any(player.outstanding for player in playing):
        raise Deadlock(_who_waits(list(playing)))


_ENDED = object()


def _who_waits(players: Sequence[Player]) -> str:
    lines = ["the joined ranks wait for one another, and none can go on:"]
    for player in players:
        parts = list(player.outstanding.values())
        arrived = [part for part in parts if part.ready_s is not None]
        what = f"waits in {_named((arrived or parts)[0])}" if parts else "has ended"
        lines.append(f"  rank {player.rank} {what}")
    lines.append("All ranks of a group must call the same collectives in the same order.")
    return "\n".join(lines)


def _named(part: Part) -> str:
    step, rank = part.step, part.player.rank
    where = f" in {step.module}" if step.module else ""
    if step.name in ("send", "recv"):
        (peer,) = (other for other in step.ranks if other != rank)
        way = "send to" if step.name == "send" else "recv from"
        return f"{way} rank {peer} of {step.size_bytes:,} bytes{where}"
    return f"{step.name} of {step.size_bytes:,} bytes among ranks {list(step.ranks)}{where}"


def _check(programs: Sequence[Program]) -> None:
    if not programs:
        raise ValueError("no recordings to join: give the timelines of at least one rank")
    ranks = [program.rank for program in programs]
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(
            f"several recordings are of rank {twice[0]}: join one of each rank (their ranks: {ranks})"
        )
    for program in programs:
        used = {step.gpu for step in program.steps if isinstance(step, Stream)}
        if len(used) > 1:
            raise ValueError(
                f"rank {program.rank} used {len(used)} GPUs in its recording; joined ranks have "
                "one each"
            )
        for step in program.steps:
            if isinstance(step, Collective) and step.name in ("send", "recv"):
                lonely = [rank for rank in step.ranks if rank not in ranks]
                if lonely and len(programs) > 1:
                    raise ValueError(
                        f"rank {program.rank} calls {step.name} with rank {lonely[0]}, of which "
                        f"there is no recording: join it too (joined are {ranks})"
                    )
