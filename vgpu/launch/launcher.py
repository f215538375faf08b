"""Run a function that was defined in a notebook cell on several processes with a process group.

def hello(rank, world_size):
    print("hello from rank", rank)
    return rank

launch.run(hello, 4)                # [0, 1, 2, 3]
launch.run(hello, 4, gpu="V100")    # each rank with a GPU of its own, real or virtual
"""

import linecache
import os
import pickle
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import vgpu
from vgpu.launch import call_sites as places
from vgpu.launch import faults, hangs, machine
from vgpu.launch.errors import LaunchError, RankDied, RankRaised, RanksHung
from vgpu.launch.forkserver import SOCKETS_FOLDER
from vgpu.launch.output import Output
from vgpu.launch.payload import pack
from vgpu.launch.rank import Job, inside_rank, report, result_path
from vgpu.launch.team import Member, Team

__all__ = ["LaunchError", "RankDied", "RankRaised", "RanksHung", "report", "run"]

RANKS_PER_CORE = 16
"""With more processes on a core they mostly wait for one another and fill the memory."""

START_LIMIT_S = 180.0
"""For all ranks to join the process group; a kernel's first run imports torch for them."""

FIRST_LOOK_S = 0.5
"""When the ranks are first checked for a deadlock; the time between checks doubles."""

SHORT_LIMIT_S = 300.0
"""A group that times out sooner than this, and before the run does, raises an error of its own."""


def run(
    function: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout_s: float | None = 300.0,
    on_report: Callable[[int, Any], object] | None = None,
    output: Literal["live", "by rank"] = "live",
    gpu: str | vgpu.GPUSpec | None = None,
    memory_bytes: int | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on ``nprocs`` processes; their results, by rank.

    The function may come from a cell, with whatever it refers to; it travels by value, as do its
    arguments and results. Every rank finds the default process group ready (gloo on CPUs; gloo
    and NCCL if each rank has a GPU of its own), the environment variables that torchrun sets,
    and its share of the machine's cores as threads.

    With ``gpu``, a preset or a GPUSpec, each rank has a GPU: a real one where the machine has enough
    of them and COURSE_DEVICES is not "vgpu", else a virtual one of that kind, with ``memory_bytes``
    in place of the kind's own. It is the rank's current device,
    ``torch.device(torch.accelerator.current_accelerator().type, rank)``; its collectives run over
    NCCL, or virtually over gloo.

    ``output="live"`` shows what the ranks print as they print it, in order of time; ``"by rank"``
    shows it once all have ended, one rank after another. ``on_report(rank, content)`` is called here for each
    ``launch.report(content)`` of a rank. ``timeout_s`` limits the whole run; None sets no limit.

    Raises RankRaised, RankDied or RanksHung (all of them LaunchError) when a rank does not return;
    TypeError or ValueError for arguments that cannot work. No process outlives the call; outside
    Linux, one that a rank has started in a session of its own does.
    """
    __tracebackhide__ = True
    _check(function, nprocs, timeout_s, output)
    gpus = _virtual_gpus(nprocs, gpu, memory_bytes)
    _check_call(function, nprocs, args)
    payload = pack(function, args)
    jobs = _jobs(nprocs, gpus, connected=gpu is not None and gpus is None)
    with Team(jobs, payload, Output(nprocs, by_rank=output == "by rank"), on_report) as team:
        try:
            _follow(team, START_LIMIT_S, lambda member: member.joined)
            _follow(team, timeout_s, lambda member: member.outcome is not None)
        except KeyboardInterrupt:
            where = hangs.explain(team.ask_where(time_s=1), faults.label)
            print(f"Stopped. Where the ranks were:\n{where}")
            raise KeyboardInterrupt from None
        except LaunchError as error:
            # Further frames are the launcher's own; a learner has no use for them.
            raise error.with_traceback(None) from error.__cause__
        results = [_unpack(m, team.scratch) for m in team.members]
        team.release(time_s=10)
    return results


def _check(function: object, nprocs: object, timeout_s: object, output: object) -> None:
    if inside_rank():
        raise LaunchError("launch.run was called inside a rank of another launch.run.")
    if not callable(function):
        raise TypeError(
            f"launch.run takes a function first, as in launch.run(train, 2); found {function!r}."
        )
    if not isinstance(nprocs, int) or isinstance(nprocs, bool):
        kind = type(nprocs).__name__
        raise TypeError(f"the number of ranks must be an int; found {nprocs!r} ({kind}).")
    cores = machine.cores()
    most = RANKS_PER_CORE * cores
    if nprocs < 1:
        raise ValueError(f"launch.run needs at least 1 rank; found {nprocs}.")
    if nprocs > most:
        raise ValueError(
            f"{nprocs} ranks are too many for {cores} cores: every rank is a process of its own "
            f"with its own memory. Use at most {most} here ({RANKS_PER_CORE} for each core)."
        )
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a positive number of seconds; found {timeout_s!r}.")
    if output not in ("live", "by rank"):
        raise ValueError(f'output must be "live" or "by rank"; found {output!r}.')


def _check_call(function: Callable[..., Any], nprocs: int, args: tuple[Any, ...]) -> None:
    try:
        found = signature(function)
    except ValueError:
        return  # some functions written in C have no signature
    try:
        found.bind(0, nprocs, *args)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        wanted = ", ".join(["rank", "world_size", *(f"argument {i + 1}" for i in range(len(args)))])
        raise TypeError(
            f"launch.run calls {name}({wanted}), and {name}{found} cannot be called like that: {error}."
        ) from None


def _virtual_gpus(
    nprocs: int, gpu: str | vgpu.GPUSpec | None, memory_bytes: int | None
) -> tuple[vgpu.GPUSpec, int] | None:
    """The kind and bytes of each rank's virtual GPU; None where it has a real one, or none."""
    if gpu is None:
        if memory_bytes is not None:
            raise ValueError(
                "memory_bytes is of each rank's virtual GPU: name its kind too, as in "
                'launch.run(train, 4, gpu="V100", memory_bytes=2**30).'
            )
        return None
    spec = vgpu.get_spec(gpu)
    capacity_bytes = spec.memory_bytes if memory_bytes is None else memory_bytes
    if not isinstance(capacity_bytes, int) or capacity_bytes <= 0:
        raise ValueError(
            "memory_bytes must be a positive whole number, such as 16 * 2**30; "
            f"found {memory_bytes!r}."
        )
    real = machine.real_gpus_for(nprocs) and os.environ.get("COURSE_DEVICES") != "vgpu"
    return None if real else (spec, capacity_bytes)


def _jobs(
    world_size: int, gpus: tuple[vgpu.GPUSpec, int] | None, *, connected: bool = False
) -> list[Job]:
    threads = machine.threads_per_rank(world_size)
    on = "vgpu" if gpus else "cuda" if machine.real_gpus_for(world_size) else "cpu"
    backend = machine.backend(on)
    shared = {
        # A figure drawn in a rank is shown by the notebook, not by the rank.
        "MPLBACKEND": "agg",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(machine.free_port()),  # for scripts that meet there; we meet in a file
        "OMP_NUM_THREADS": str(threads),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    defaults = dict(places.RECORDER)
    if loopback := machine.loopback():
        defaults["GLOO_SOCKET_IFNAME"] = loopback  # all ranks are on this machine
    # Another thread may be starting its forkserver: what is meant for that must not reach a rank.
    inherited = {name: value for name, value in os.environ.items() if name != SOCKETS_FOLDER}
    # The source of a cell is only in linecache, in entries without a modification time.
    sources = {n: e for n, e in linecache.cache.items() if len(e) == 4 and e[1] is None}
    return [
        Job(
            rank=rank,
            world_size=world_size,
            backend=backend,
            threads=threads,
            gpus=gpus,
            connected=connected,
            environment={
                **defaults,
                **inherited,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            sources=sources,
        )
        for rank in range(world_size)
    ]


def _follow(team: Team, limit_s: float | None, arrived: Callable[[Member], bool]) -> None:
    """Listen until every rank has arrived; raise the fault, or RanksHung when time is up."""
    began_s = time.monotonic()
    deadline_s = float("inf") if limit_s is None else began_s + limit_s
    look_s = began_s + FIRST_LOOK_S
    seen: tuple[object, ...] = ()
    while not all(map(arrived, team.members)):
        team.listen(min(deadline_s, look_s))
        _raise_failure(team)
        now_s = time.monotonic()
        if now_s < min(deadline_s, look_s):
            continue
        where = team.ask_where(time_s=2)
        _raise_failure(team)  # of one that failed before it could answer
        before, seen = seen, hangs.standstill(where)
        still = seen == before
        certain = still and hangs.is_deadlock(where, min(deadline_s - now_s, SHORT_LIMIT_S))
        if certain or now_s >= deadline_s:
            time_s = min(round(now_s - began_s, 1), deadline_s - began_s)
            raise faults.hang(team.members, where, time_s, certain)
        # A check costs the ranks a little, and the longer they have run, the less urgent it is.
        look_s = now_s + (now_s - began_s)


def _raise_failure(team: Team) -> None:
    if any(map(faults.failed, team.members)):
        _settle(team)
        raise faults.fault(team.members, team.scratch)


def _settle(team: Team) -> None:
    """Listen for other failures: the first one reported need not be the first that happened."""
    began_s = time.monotonic()
    until_s = began_s + 0.2
    while time.monotonic() < until_s:
        team.listen(until_s)
        failed = filter(faults.failed, team.members)
        if all(map(faults.is_consequence, failed)):
            # They have lost a rank whose own end has yet to be noticed.
            until_s = min(time.monotonic() + 0.2, began_s + 5)


def _unpack(member: Member, scratch: Path) -> Any:
    try:
        with result_path(scratch, member.rank).open("rb") as file:
            return pickle.load(file)
    except FileNotFoundError as error:
        raise LaunchError(
            f"rank {member.rank} has returned, but the folder of this run is gone: {scratch}. "
            "Something else has removed it, such as a cleaner of temporary files. Run it again; "
            "the environment variable TMPDIR names another place."
        ) from error
    except Exception as error:
        raise LaunchError(
            f"the result of rank {member.rank} arrived, but cannot be rebuilt here "
            f"({type(error).__name__}: {str(error).rstrip('.')}). "
            "Return tensors, numbers, figures, state_dicts or model.module."
        ) from error
