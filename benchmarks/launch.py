"""Seconds until ranks have talked and ended: launch.run beside three other ways to start them.

Each rank joins a gloo group, takes part in one ``all_reduce`` and ends. A fresh Python process
makes a first call and later ones, as a notebook does when a cell is run again; torchrun is a new
command each time. accelerate is measured where it can be imported: ``make bench`` puts it into a
folder of its own, since the course does not need it. ``make bench ARGS=launch`` measures this
alone and writes it to RESULTS.md.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = (2, 4, 8)
LATER_CALLS = 3
PEERS = ("launch.run", "mp.spawn", "notebook_launcher", "torchrun")
SCRIPT = str(Path(__file__).resolve())


def talk(rank: int, world_size: int) -> None:
    """What every rank does under every way to start it, once it has its group."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


def join_and_talk() -> None:
    """The same where joining the group is left to the function."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    talk(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def spawned(rank: int, world_size: int, port: int) -> None:
    """The same where the environment is left to the function as well."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    join_and_talk()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(peer: str, ranks: int) -> None:
    """Start that many ranks in one of the ways, and wait until they have ended."""
    # Each way is imported where it is used, so that the ranks of the others do not load it.
    if peer == "launch.run":
        from vgpu import launch

        launch.run(talk, ranks)
    elif peer == "mp.spawn":
        mp.spawn(spawned, (ranks, free_port()), nprocs=ranks)
    elif peer == "notebook_launcher":
        from accelerate import notebook_launcher

        with contextlib.redirect_stdout(sys.stderr):
            notebook_launcher(join_and_talk, num_processes=ranks, use_port=str(free_port()))
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*torchrun, f"--nproc-per-node={ranks}", SCRIPT, "--join"], check=True)


def timed(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def fresh_process(peer: str, ranks: int) -> list[float]:
    """Seconds of a first and of later calls in a Python process that has only imported torch."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--calls", peer, str(ranks)],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()},
    )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def main() -> str:
    """The section of RESULTS.md: a table of seconds, then ratios of the same run."""
    peers = [p for p in PEERS if p != "notebook_launcher" or importlib.util.find_spec("accelerate")]
    rows, ratios = [], []
    for ranks in RANKS:
        seconds = {peer: fresh_process(peer, ranks) for peer in peers}
        first = {peer: times[0] for peer, times in seconds.items()}
        later = {peer: statistics.median(times[1:]) for peer, times in seconds.items()}
        for peer in peers:
            ratio = later[peer] / later["launch.run"]
            rows.append(
                f"| {ranks} | {peer} | {first[peer]:.2f} | {later[peer]:.2f} | {ratio:.1f} |"
            )
        ratios.append(f"{later['mp.spawn'] / later['launch.run']:.0f} times ({ranks} ranks)")
    missing = "" if "notebook_launcher" in peers else " accelerate was not installed."
    return "\n".join(
        [
            "## Starting ranks",
            "",
            "Seconds from the call until every rank has joined a gloo group, run one all_reduce and "
            f"exited. Later calls are the median of {LATER_CALLS} in the same process; the last column is "
            f"their ratio to launch.run's.{missing}",
            "",
            "| ranks | started by | first call, s | later calls, s | times launch.run |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Later calls of mp.spawn take {', '.join(ratios)} as long as those of launch.run. The "
            "first call of launch.run starts the forkserver, which imports torch once. "
            "notebook_launcher forks the notebook itself, which isn't safe once the notebook has used "
            "a GPU or threads.",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", action="store_true", help="be a rank that torchrun has started")
    parser.add_argument("--calls", nargs=2, metavar=("WAY", "RANKS"), help="time calls, as JSON")
    options = parser.parse_args()
    if options.join:
        join_and_talk()
    elif options.calls:
        way, count = options.calls
        work = partial(call, way, int(count))
        print(json.dumps([timed(work) for _ in range(1 + LATER_CALLS)]))
    else:
        print(main())
