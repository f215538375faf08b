"""Time until ranks have communicated and exited: launch.run compared with three other launchers.

Each rank joins a gloo group, takes part in one ``all_reduce`` and exits. A fresh Python process
makes a first call and later ones, like a notebook whose cell is run again; torchrun is a new
command each time. accelerate is measured if it can be imported: ``make bench`` installs it into a
separate folder, since the course doesn't need it. ``make bench ARGS=launch`` runs only this
benchmark and writes its results to RESULTS.md.
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
    """Do what every rank does with every launcher, once it's in a group."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


def join_and_talk() -> None:
    """Do the same as ``talk`` where the function itself must join the group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    talk(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def spawned(rank: int, world_size: int, port: int) -> None:
    """Do the same where the function must set the environment, too."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    join_and_talk()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(peer: str, ranks: int) -> None:
    """Start that many ranks with one of the launchers, and wait until they have exited."""
    # Each launcher is imported where it's used, so the other launchers' ranks don't load it.
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
    """Return the seconds of a first call and of later ones in a process that only imported torch."""
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
    """Return the section of RESULTS.md: a table of seconds, then ratios from the same run."""
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
            f"exited. Later calls are the median of {LATER_CALLS} in the same process; the last column "
            f"compares them with later calls of launch.run.{missing}",
            "",
            "| ranks | started by | first call, s | later calls, s | relative to launch.run |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Later calls of mp.spawn take {', '.join(ratios)} as long as launch.run's. The "
            "first call of launch.run starts the forkserver, which imports torch once. "
            "notebook_launcher forks the notebook itself, which isn't safe once the notebook has used "
            "a GPU or threads.",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", action="store_true", help="run as a rank started by torchrun")
    parser.add_argument(
        "--calls", nargs=2, metavar=("WAY", "RANKS"), help="time calls, and print JSON"
    )
    options = parser.parse_args()
    if options.join:
        join_and_talk()
    elif options.calls:
        way, count = options.calls
        work = partial(call, way, int(count))
        print(json.dumps([timed(work) for _ in range(1 + LATER_CALLS)]))
    else:
        print(main())
