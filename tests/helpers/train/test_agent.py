"""torchrun in a cell: the command's own agent, with ranks that are forked."""

import os
import signal
import threading
import time

import psutil
import pytest

from helpers.train.agent import torchrun
from vgpu.launch.forkserver import warm_up

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

import numpy as np

rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

def main():
    Path(sys.argv[2], f"{start}-{rank}").write_text(str(np.random.random()))
    # Whoever ends first has the agent end the others, which may not have come so far.
    while len(list(Path(sys.argv[2]).glob(f"{start}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if sys.argv[1] == "lose" and (rank, start) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "refuse":
        sys.exit(3)
    if sys.argv[1] == "wait" or (sys.argv[1] == "lose" and start == "0"):
        # Python sees a signal that comes just before a long sleep only after it.
        for _ in range(6000):
            time.sleep(0.01)

if __name__ == "__main__":
    print(f"start {start}, rank {rank} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}", flush=True)
    print(os.environ.get("AGENT_TEST"), file=sys.stderr)
    try:
        main()
    except KeyboardInterrupt:
        Path(sys.argv[2], f"interrupted-{rank}").touch()
        raise
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The name of a module that ranks can import."""
    # Before its folder is on the path: a forkserver has that in its command line, and stays.
    warm_up()
    (tmp_path / "program_of_ranks.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return "program_of_ranks"


def test_a_lost_rank_starts_all_of_them_again(program, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_TEST", "of this moment")
    line = (
        f"torchrun --standalone --nproc-per-node=2 --max-restarts=1 -m {program} lose '{tmp_path}'"
    )
    done = torchrun(line)
    shown = f"['lose', '{tmp_path}']"
    assert done.line == line and done.status == 0
    assert done.output.splitlines() == [
        f"start {start}, rank {rank} of 2: {shown}" for start in (0, 1) for rank in (0, 1)
    ]
    assert done.errors.splitlines().count("of this moment") == 4


def test_without_a_restart_left_the_status_is_the_ranks(program, tmp_path):
    done = torchrun(f"torchrun --nproc-per-node=2 -m {program} refuse '{tmp_path}'")
    assert done.status == 3 and "start 0, rank 0 of 2" in done.output


def test_the_process_is_left_as_it_was(program, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    signals = [signal.SIGINT, signal.SIGTERM]
    before = dict(os.environ), list(map(signal.getsignal, signals))
    assert torchrun(f"torchrun --nproc-per-node=2 -m {program} end '{tmp_path}'").status == 0
    assert (dict(os.environ), list(map(signal.getsignal, signals))) == before
    assert capfd.readouterr().err == "", "a warning in the cell"


def test_ranks_have_random_numbers_of_their_own(program, tmp_path):
    assert torchrun(f"torchrun --nproc-per-node=2 -m {program} end '{tmp_path}'").status == 0
    assert len({path.read_text() for path in tmp_path.glob("0-*")}) == 2


@pytest.mark.skipif(os.name != "posix", reason="an interrupt reaches a process as on POSIX systems")
def test_an_interrupt_ends_the_ranks(program, tmp_path):
    def interrupt():
        while len(list(tmp_path.glob("0-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        torchrun(f"torchrun --nproc-per-node=2 --max-restarts=1 -m {program} wait '{tmp_path}'")
    thread.join()
    # Not killed, half a minute later: the process that they are forked from may be deaf to it, as
    # a shell's background jobs are.
    assert len(list(tmp_path.glob("interrupted-*"))) == 2
    left = [p for p in psutil.process_iter() if _has_open(p, tmp_path)]
    assert left == []


def _has_open(process, folder):
    try:
        return str(folder) in " ".join(process.cmdline()) or any(
            str(folder) in file.path for file in process.open_files()
        )
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    "line", ["torchrun train.py", "python -m helpers.train", "torchrun --nnodes=2 -m helpers.train"]
)
def test_what_it_cannot_do_it_says(line):
    with pytest.raises(ValueError, match=r"on one host; found .*shell\.run_lines"):
        torchrun(line)
