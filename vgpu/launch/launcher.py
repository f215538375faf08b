"""Runs a function defined in a notebook cell in multiple processes that form a process group.

def hello(rank, world_size):
    print("hello from rank", rank)
    return rank

launch.run(hello, 4)                # [0, 1, 2, 3]
launch.run(hello, 4, gpu="V100")    # each rank has its own GPU, real or virtual

This file has, in order: ``run``, the code that follows its ranks, what each rank gets, and the
errors if there are no results.
"""

import linecache
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import vgpu
from vgpu.launch import hangs
from vgpu.launch.hangs import RankState, user_call_site
from vgpu.launch.processes import SOCKETS_FOLDER, RankOutput, RankProcess, RankProcesses
from vgpu.launch.rank import Failure, Job, Result, crash_path, dumps_call, inside_rank, result_path
from vgpu.units import format_bytes, format_seconds

RANKS_PER_CORE = 16
"""The limit on ranks per core; more would mostly wait for each other and fill up memory."""

START_LIMIT_S = 180.0
"""Time limit for all ranks to join the process group; the first run in a notebook also imports torch."""

FIRST_LOOK_S = 0.5
"""The time until the ranks are first checked for a deadlock; the time between checks doubles."""

RELEASE_LIMIT_S = 10.0
"""Time limit for the ranks' processes to exit once every function has returned."""

SHORT_LIMIT_S = 300.0
"""A group whose timeout is shorter than both this and the run's timeout raises its own error."""


def run(
    function: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout_s: float | None = 300.0,
    gpu: str | vgpu.GPUSpec | None = None,
    memory_bytes: int | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in ``nprocs`` processes; return the results.

    Results are in rank order. The function, and anything it refers to, may be defined in a cell;
    it's pickled by value, as are its arguments and results. On every rank, the default process
    group is ready (gloo on CPUs; gloo and NCCL if each rank has its own GPU), torchrun's
    environment variables are set, and the number of threads is the rank's share of the machine's
    cores.

    With ``gpu``, a preset or a GPUSpec, each rank has a GPU: a real one if the machine has enough
    of them and VGPU_DEVICES is not "vgpu", otherwise a virtual one of that model; ``memory_bytes``
    overrides its memory size. The GPU is the rank's current device,
    ``torch.device(torch.accelerator.current_accelerator().type, rank)``; collectives run over NCCL
    or, for virtual GPUs, over gloo.

    What the ranks print is shown as they print it, in chronological order. ``timeout_s`` limits the
    run, not counting the time to start the ranks; None means no limit.

    Raises RankRaised, RankDied or RanksHung (each a LaunchError) if a rank doesn't return, and
    TypeError or ValueError for invalid arguments. No process outlives the call, except one that a
    rank started in a session of its own, such as a daemon.
    """
    __tracebackhide__ = True
    _check(function, nprocs, args, timeout_s)
    gpus = _virtual_gpus(nprocs, gpu, memory_bytes)
    call = dumps_call(function, args)
    jobs = _jobs(nprocs, gpus, connect_nccl=gpu is not None and gpus is None)
    with RankProcesses(jobs, call, RankOutput(nprocs)) as processes:
        try:
            _follow(processes, START_LIMIT_S, lambda rank: rank.joined is not None)
            _follow(processes, timeout_s, lambda rank: rank.outcome is not None)
        except KeyboardInterrupt:
            where = hangs.explain(processes.ask_states(time_s=1), name_file)
            print(f"Stopped. Where the ranks were:\n{where}")
            raise KeyboardInterrupt from None
        except LaunchError as error:
            # The remaining frames are the launcher's own; users have no use for them.
            raise error.with_traceback(None) from error.__cause__
        results = [_result(rank, processes.scratch) for rank in range(nprocs)]
        processes.release(RELEASE_LIMIT_S)
    return results


def _follow(
    processes: RankProcesses, limit_s: float | None, arrived: Callable[[RankProcess], bool]
) -> None:
    """Listen until all have ``arrived``; raise a rank's failure, or RanksHung if time is up."""
    began_s = time.monotonic()
    deadline_s = float("inf") if limit_s is None else began_s + limit_s
    look_s = began_s + FIRST_LOOK_S
    progress: tuple[object, ...] = ()
    while not all(map(arrived, processes.ranks)):
        processes.listen(min(deadline_s, look_s))
        _raise_failure(processes)
        now_s = time.monotonic()
        if now_s < min(deadline_s, look_s):
            continue
        states = processes.ask_states(time_s=2)
        _raise_failure(processes)  # from a rank that failed before it could answer
        before, progress = progress, hangs.progress(states)
        patience_s = min(deadline_s - now_s, SHORT_LIMIT_S)
        certain = progress == before and hangs.is_deadlock(states, patience_s)
        if certain or now_s >= deadline_s:
            time_s = min(round(now_s - began_s, 1), deadline_s - began_s)
            raise hang_error(processes.ranks, states, time_s, certain)
        # A check costs the ranks a little time, and is less urgent the longer they have run.
        look_s = now_s + (now_s - began_s)


def _raise_failure(processes: RankProcesses) -> None:
    if not any(map(has_failed, processes.ranks)):
        return
    # Listen for other failures: the first one reported need not be the first that happened.
    began_s = time.monotonic()
    until_s = began_s + 0.2
    while time.monotonic() < until_s:
        processes.listen(until_s)
        if all(map(has_lost_peer, filter(has_failed, processes.ranks))):
            # These ranks lost a rank whose own death hasn't been noticed yet.
            until_s = min(time.monotonic() + 0.2, began_s + 5)
    if any(rank.died for rank in processes.ranks):
        processes.ask_states(time_s=1)
    raise failure_error(processes.ranks, processes.scratch)


def _result(rank: int, scratch: Path) -> Any:
    try:
        with result_path(scratch, rank).open("rb") as file:
            return pickle.load(file)
    except Exception as error:
        raise LaunchError(
            f"the result of rank {rank} was sent, but can't be unpickled here "
            f"({type(error).__name__}: {str(error).rstrip('.')}). {RETURN_WHAT}"
        ) from error


def _check(function: Any, nprocs: object, args: tuple[Any, ...], timeout_s: object) -> None:
    if inside_rank():
        raise LaunchError("launch.run was called inside a rank of another launch.run.")
    if not callable(function):
        raise TypeError(
            "launch.run's first argument must be a function, as in launch.run(train, 2); "
            f"got {function!r}."
        )
    if not isinstance(nprocs, int) or isinstance(nprocs, bool):
        kind = type(nprocs).__name__
        raise TypeError(f"the number of ranks must be an int; got {nprocs!r} ({kind}).")
    most = RANKS_PER_CORE * cores()
    if nprocs < 1:
        raise ValueError(f"launch.run needs at least 1 rank; got {nprocs}.")
    if nprocs > most:
        raise ValueError(
            f"{nprocs} ranks are too many for {cores()} cores: every rank is a process "
            f"with its own memory. Use at most {most} here ({RANKS_PER_CORE} per core)."
        )
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a positive number of seconds; got {timeout_s!r}.")
    try:
        parameters = signature(function)
    except ValueError:
        return  # some functions written in C have no signature
    try:
        parameters.bind(0, nprocs, *args)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        call = ", ".join(["rank", "world_size", *(f"argument {i + 1}" for i in range(len(args)))])
        raise TypeError(
            f"launch.run calls {name}({call}), and {name}{parameters} can't be called that way: "
            f"{error}."
        ) from None


def _virtual_gpus(
    nprocs: int, gpu: str | vgpu.GPUSpec | None, memory_bytes: int | None
) -> tuple[vgpu.GPUSpec, int] | None:
    """Return the model and memory size of each rank's virtual GPU; None if ranks have none."""
    if gpu is None:
        if memory_bytes is not None:
            raise ValueError(
                "memory_bytes is the memory size of each rank's virtual GPU: also pass gpu, as in "
                'launch.run(train, 4, gpu="V100", memory_bytes=2**30).'
            )
        return None
    spec = vgpu.get_spec(gpu)
    capacity_bytes = spec.memory_bytes if memory_bytes is None else memory_bytes
    if not isinstance(capacity_bytes, int) or capacity_bytes <= 0:
        raise ValueError(
            f"memory_bytes must be a positive integer, such as 16 * 2**30; got {memory_bytes!r}."
        )
    real = real_gpus_for(nprocs) and os.environ.get("VGPU_DEVICES") != "vgpu"
    return None if real else (spec, capacity_bytes)


def _jobs(
    world_size: int, gpus: tuple[vgpu.GPUSpec, int] | None, *, connect_nccl: bool = False
) -> list[Job]:
    threads = threads_per_rank(world_size)
    kind = "vgpu" if gpus else "cuda" if real_gpus_for(world_size) else "cpu"
    shared = {
        # A figure drawn by a rank is shown by the notebook, not by the rank.
        "MPLBACKEND": "agg",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # for the user's code; the launcher uses a file
        "OMP_NUM_THREADS": str(threads),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    defaults = dict(hangs.RECORDER)
    if interface := loopback():
        defaults["GLOO_SOCKET_IFNAME"] = interface  # all ranks are on this machine
    # Another thread may be starting the forkserver, whose variable must not reach a rank.
    inherited = {name: value for name, value in os.environ.items() if name != SOCKETS_FOLDER}
    # The source of a cell is only in linecache, in entries without a modification time.
    sources = {n: e for n, e in linecache.cache.items() if len(e) == 4 and e[1] is None}
    return [
        Job(
            rank=rank,
            world_size=world_size,
            backend=backend(kind),
            threads=threads,
            gpus=gpus,
            connect_nccl=connect_nccl,
            environment=defaults
            | inherited
            | shared
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            sources=sources,
        )
        for rank in range(world_size)
    ]


def cores() -> int:
    """Return the number of cores that this process may use; schedulers and containers limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Return each rank's share of the cores, at least 1, for ``torch.set_num_threads``."""
    return max(1, cores() // ranks)


def real_gpus_for(ranks: int) -> bool:
    """Whether each of ``ranks`` ranks can have its own real GPU, connected by NCCL."""
    return dist.is_nccl_available() and torch.cuda.device_count() >= ranks


def backend(device_type: str) -> str:
    """Return the backend for ``init_process_group`` if ranks use that type of device."""
    return {"cuda": "cpu:gloo,cuda:nccl", "vgpu": "cpu:gloo,vgpu:vccl"}.get(device_type, "gloo")


def loopback() -> str | None:
    """Return the machine's loopback network interface; None if it has no name.

    Ranks on one machine use this interface (GLOO_SOCKET_IFNAME). Otherwise gloo looks up the
    machine's own name, which fails on some machines.
    """
    interfaces = socket.if_nameindex() if hasattr(socket, "if_nameindex") else []
    return next((name for _, name in interfaces if name in ("lo", "lo0")), None)


def free_port() -> int:
    """Return a port for the ranks' rendezvous that's free, and won't be assigned automatically.

    A program that asks for any free port gets one above 32767 on Linux and above 49151 elsewhere,
    so a port in that range might be taken before the ranks have started. Raises OSError if none of
    100 ports is free.
    """
    # The system's random numbers aren't affected by the user's seed.
    ports = random.SystemRandom().sample(range(20_000, 30_000), 100)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        "found no free port for the ranks: tried 100 between 20000 and 29999. "
        "Choose one yourself, with --master-port or --rdzv-endpoint."
    )


# What ``run`` raises if there are no results: which rank failed, where, and why

RETURN_WHAT = "Return tensors, numbers, figures, state_dicts or model.module."

# gloo's and NCCL's errors on a rank that lost its peer: the failure to report is the peer's.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection refused"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class LaunchError(RuntimeError):
    """``launch.run`` has no results; the message says which rank failed, where and why."""


class RankRaised(LaunchError):
    """A rank raised an exception, called ``sys.exit``, or returned something that can't be sent.

    ``__cause__`` is the rank's own exception, if it can be pickled.
    """


class RankDied(LaunchError):
    """A rank's process was killed by a signal, or exited without raising an exception."""


class RanksHung(LaunchError):
    """Some ranks didn't return within the time limit, or never would have."""


def has_failed(rank: RankProcess) -> bool:
    """Whether a rank can no longer return a result."""
    return rank.died or isinstance(rank.outcome, Failure)


def has_lost_peer(rank: RankProcess) -> bool:
    """Whether a rank failed only because it lost another rank."""
    failure = rank.outcome
    return isinstance(failure, Failure) and bool(_LOST_PEER.search(failure.summary))


def failure_error(ranks: Sequence[RankProcess], scratch: Path) -> LaunchError:
    """Return the error for the first rank that failed on its own."""
    failed = sorted(filter(has_failed, ranks), key=lambda r: (has_lost_peer(r), _failed_ns(r)))
    if failed[0].died:
        return _died(failed[0], ranks, scratch)
    # If multiple ranks raised the same error, it's random which was first: report the lowest rank.
    same = [r for r in failed if _summary(r) == _summary(failed[0])]
    first = min(same, key=lambda r: r.rank)
    others = [r for r in failed if r is not first]
    assert isinstance(first.outcome, Failure)
    return _raised(first.rank, first.outcome, others, len(ranks))


def hang_error(
    ranks: Sequence[RankProcess], states: Sequence[RankState | None], time_s: float, certain: bool
) -> RanksHung:
    """Return the error for ranks that didn't return; ``certain`` if they never would have."""
    late = [rank for rank in ranks if not isinstance(rank.outcome, Result)]
    never = " and never would have" if certain else ""
    return RanksHung(
        f"after {format_seconds(time_s)}, {len(late)} of {len(ranks)} ranks had not returned"
        f"{never}; all were stopped.\n{hangs.explain(states, name_file)}"
    )


def name_file(filename: str) -> str:
    """Return the notebook's name for a cell, such as "Cell In[3]"; otherwise the file's name."""
    return _cell_name(filename) or os.path.basename(filename)


def _cell_name(filename: str) -> str | None:
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    words = shell and shell.compile.format_code_name(filename)
    return " ".join(words) if words else None


def _failed_ns(rank: RankProcess) -> int:
    if isinstance(rank.outcome, Failure):
        return rank.outcome.stamp_ns
    assert rank.ended_ns is not None
    return rank.ended_ns


def _raised(number: int, failure: Failure, others: list[RankProcess], world: int) -> RankRaised:
    rank = f"rank {number} of {world}"
    text = {
        "raised": f"{rank} raised {failure.summary}",
        "exited": f"{rank} called sys.exit before it returned: {failure.summary}",
        "unreadable": f"{rank} couldn't unpickle the function sent to it: {failure.summary}",
        "unsendable": (
            f"{rank} returned something that can't be sent back through a file in "
            f"{tempfile.gettempdir()}: "
            f"{failure.summary}. {RETURN_WHAT}"
        ),
    }[failure.kind]
    notes = []
    same = [r.rank for r in others if _summary(r) == failure.summary]
    if same:
        notes.append(f"The same happened on {hangs.ranks_text(same)}.")
    for other in others:
        if other.rank not in same and not has_lost_peer(other):
            notes.append(f"Then rank {other.rank} failed: {_summary(other)}")
    if len(others) + 1 < world:
        notes.append("The other ranks were stopped.")
    if "at start of device string: vgpu" in failure.summary:
        notes.append(
            'The ranks have no virtual GPUs: pass a model, as in launch.run(..., gpu="H100").'
        )
    trace = "" if failure.kind == "unsendable" else _name_cells(failure.traceback)
    error = RankRaised("\n\n".join(filter(None, [text, trace, "\n".join(notes)])))
    if failure.exception is not None:
        with suppress(Exception):  # unpickling may fail in this process; the error's text is above
            error.__cause__ = pickle.loads(failure.exception)
    return error


def _summary(rank: RankProcess) -> str:
    return rank.outcome.summary if isinstance(rank.outcome, Failure) else "its process died"


def _name_cells(text: str) -> str:
    def renamed(frame: re.Match[str]) -> str:
        cell = _cell_name(frame[1])
        return f"{cell}, line {frame[2]}" if cell else frame[0]

    return _FRAME.sub(renamed, text)


def _died(rank: RankProcess, ranks: Sequence[RankProcess], scratch: Path) -> RankDied:
    code, world = rank.exit_code, len(ranks)
    name = f"rank {rank.rank} of {world}"
    if code is not None and code < 0:
        known = {number.value: number.name for number in signal.Signals}
        text = f"{name} was killed by signal {known.get(-code, -code)}."
    else:
        text = f"{name} exited with code {code} before it returned (os._exit, or C code)."
    if code == -getattr(signal, "SIGKILL", 9):
        text += (
            f" The system does this when memory runs out: {world} ranks hold {world} copies of "
            f"everything they use, and this machine now has "
            f"{format_bytes(psutil.virtual_memory().available)} free. Try fewer ranks or less data."
        )
    elif code in (-getattr(signal, "SIGSEGV", 11), -getattr(signal, "SIGBUS", 7)):
        text += " C code accessed memory that it doesn't own, or /dev/shm is full."
    text += _crash_line(crash_path(scratch, rank.rank))
    text = "\n".join([text, *hangs.mismatches([each.state for each in ranks])])
    return RankDied(text + "\nThe other ranks were stopped." if world > 1 else text)


def _crash_line(path: Path) -> str:
    """Return the user's line, from what faulthandler wrote when the process crashed."""
    text = path.read_text(errors="replace") if path.exists() else ""
    _, _, current = text.partition("Current thread")
    frames = [(name, int(line)) for name, line in _FRAME.findall(current.partition("\n\n")[0])]
    call_site = user_call_site(frames)
    return f"\nIt was at {hangs.at(call_site, name_file)}." if call_site else ""
