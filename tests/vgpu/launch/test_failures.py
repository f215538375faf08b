"""Every fault in a rank is reported with its location, and leaves nothing behind."""

import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from cells import cell

from vgpu import launch
from vgpu.launch import launcher
from vgpu.launch.processes import RankProcesses

# Most tests look at the ranks early: they check what's found, not when the first look happens.
EARLY_S = 0.1


@dataclass
class Fault:
    """A fault, caused by the body of a function that each rank runs."""

    name: str
    body: str
    error: type[launch.LaunchError]
    phrases: list[str]
    """What the message must contain."""
    nprocs: int = 2
    timeout_s: float = 60.0
    absent: list[str] = field(default_factory=list)
    first_look_s: float = EARLY_S
    """When the launcher first looks for ranks that hang."""


TABLE = [
    Fault(
        "an exception",
        "if rank == 1: raise ValueError('bad batch')\ndist.barrier()",
        launch.RankRaised,
        [
            "rank 1 of 3 raised ValueError: bad batch",
            "line 2, in main\n    if rank == 1: raise ValueError('bad batch')",
            "The other ranks were stopped.",
        ],
        nprocs=3,
    ),
    Fault(
        "the same exception on every rank",
        "return 1 / 0",
        launch.RankRaised,
        ["rank 0 of 3 raised ZeroDivisionError", "The same happened on ranks 1 and 2."],
        nprocs=3,
        absent=["were stopped"],
    ),
    Fault(
        "an exception that does not survive pickling",
        """
class Odd(Exception):
    def __init__(self, a, b): super().__init__('odd'); self.lock = threading.Lock()
try:
    1 / 0
except ZeroDivisionError as error:
    raise Odd(1, 2) from error""",
        launch.RankRaised,
        ["Odd: odd\n", "ZeroDivisionError: division by zero", "direct cause"],
    ),
    Fault(
        "sys.exit",
        "if rank == 1: sys.exit('enough')\ndist.barrier()",
        launch.RankRaised,
        ["rank 1 of 2 called sys.exit before it returned: SystemExit: enough", "line 2"],
    ),
    Fault(
        "a run inside a rank",
        "launch.run(print, 2)",
        launch.RankRaised,
        ["launch.run was called inside a rank of another launch.run"],
    ),
    Fault(
        "a tensor on a virtual GPU without gpu=",
        "torch.ones(2, device='vgpu')",
        launch.RankRaised,
        ["device string: vgpu", "have no virtual GPUs: pass a model", 'gpu="H100"'],
    ),
    Fault(
        "a result that cannot be pickled",
        "return threading.Lock()",
        launch.RankRaised,
        ["rank 0 of 2 returned something that can't be sent back", "lock", "model.module"],
    ),
    Fault(
        "a result that cannot be unpickled",
        "return DDP(torch.nn.Linear(1, 1))",
        launch.LaunchError,
        ["the result of rank 0 was sent, but can't be unpickled here", "model.module"],
    ),
    Fault(
        "killed, as when memory runs out",
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        launch.RankDied,
        ["rank 1 of 3 was killed by signal SIGKILL", "memory runs out", "3 copies", " free. Try"],
        nprocs=3,
        absent=["closed by peer"],
    ),
    Fault(
        "a crash in C code",
        "dist.barrier()\nif rank == 1: ctypes.string_at(0)\ndist.barrier()",
        launch.RankDied,
        ["rank 1 of 2 was killed by signal SIGSEGV", "line 3: if rank == 1: ctypes.string_at"],
    ),
    Fault(
        "an exit code",
        "if rank == 0: os._exit(3)\ndist.barrier()",
        launch.RankDied,
        ["rank 0 of 2 exited with code 3 before it returned"],
    ),
    Fault(
        "a collective that one rank skips",
        "t = torch.ones(2)\ndist.all_reduce(t)\nif rank == 2: return\ndist.all_reduce(t)",
        launch.RanksHung,
        [
            "2 of 3 ranks had not returned and never would have; all were stopped",
            "rank 0 is waiting in all_reduce, ",
            "line 5: dist.all_reduce(t)",
            "rank 2 has returned from the function",
            "collective 2 of the default group: ranks 0 and 1 arrived, rank 2 never arrived.",
        ],
        nprocs=3,
    ),
    Fault(
        "a rank that is busy elsewhere",
        "if rank == 1:\n    while True: pass\ndist.broadcast(torch.ones(1), 0)\ndist.barrier()",
        launch.RanksHung,
        ["rank 1 is at <cell", "line 3: while True: pass", "rank 1 never arrived"],
        timeout_s=1.0,
        absent=["never would have"],
    ),
    Fault(
        "different collectives",
        "t = torch.ones(1)\nif rank: dist.all_reduce(t)\nelse: dist.all_gather([t, t], t)",
        launch.RanksHung,
        ["Mismatch at collective 1", "rank 0 calls all_gather; rank 1 calls all_reduce"],
    ),
    Fault(
        "tensors of different sizes",
        "dist.all_reduce(torch.ones(2 + rank))\ndist.barrier()",
        launch.RanksHung,
        ["never would have", "rank 0 passes [[2]] Float; rank 1 passes [[3]] Float"],
    ),
    Fault(
        "groups used in a different order",
        """
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
for group in groups[:: 1 - 2 * rank]:
    dist.all_reduce(torch.ones(1), group=group)""",
        launch.RanksHung,
        [
            "collective 1 of group 1: rank 0 arrived, rank 1 never",
            "group 2: rank 1 arrived, rank 0",
        ],
    ),
    Fault(
        "an asynchronous collective",
        "if rank: return\nwork = dist.all_reduce(torch.ones(1), async_op=True)\nx = 1\nwork.wait()",
        launch.RanksHung,
        [
            "rank 0 is waiting in wait(), ",
            "line 5: work.wait(); unfinished: the all_reduce started at",
        ],
    ),
    Fault(
        "a group with a time limit of its own",
        """
group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
if rank: dist.all_reduce(torch.ones(1), group=group)""",
        launch.RankRaised,
        ["rank 1 of 2 raised", "imed out", "line 3, in main\n    if rank: dist.all_reduce("],
        absent=["never would have"],
    ),
    Fault(
        "a wait with a time limit",
        """
if rank:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait(datetime.timedelta(seconds=1))""",
        launch.RankRaised,
        ["rank 1 of 2 raised", "imed out", "line 4, in main"],
        absent=["never would have"],
    ),
    Fault(
        "a recv without its send",
        "if rank: dist.recv(torch.ones(1), 0)\nelse: time.sleep(1000)",
        launch.RanksHung,
        ["rank 1 is waiting in recv from rank 0, ", "rank 0 is at", "time.sleep(1000)"],
        timeout_s=1.0,
    ),
    Fault(
        "DDP with unequal numbers of batches",
        """
model = DDP(torch.nn.Linear(2, 1))
for _ in range(2 + rank):
    model(torch.ones(1, 2)).sum().backward()""",
        launch.RanksHung,
        [
            "rank 1 is waiting in all_reduce inside backward (Distrib",
            "line 4: model(",
            "rank 0 never",
        ],
    ),
    Fault(
        "DDP built on one rank only",
        "if rank == 0: DDP(torch.nn.Linear(2, 1))",
        launch.RanksHung,
        ["rank 0 is waiting in the constructor of DistributedDataParallel", "rank 1 never arrived"],
    ),
    Fault(
        "a forward under fully_shard on one rank only",
        """
from torch.distributed.fsdp import fully_shard
net = torch.nn.Linear(2, 2)
fully_shard(net)
if rank == 0: net(torch.ones(1, 2))""",
        launch.RanksHung,
        ["rank 0 is waiting in a gather or reduction of fully_shard, ", "rank 1 never arrived"],
    ),
    Fault(
        "ranks that are only slow",
        "while True: pass",
        launch.RanksHung,
        ["after 500 ms, 2 of 2", "No rank is waiting for another: they may just need more time"],
        timeout_s=0.5,
    ),
    Fault(
        "a rank that is stopped",
        "if rank: os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()",
        launch.RanksHung,
        ["2 of 2 ranks had not returned and never would have", "rank 1 is stopped"],
    ),
    Fault(
        "a ring of receives",
        "dist.recv(torch.ones(2), 1 - rank)",
        launch.RanksHung,
        [
            "never would have",
            "rank 0 is waiting in recv from rank 1",
            "rank 1 is waiting in recv from rank 0",
        ],
    ),
    Fault(
        "a group that only one rank creates",
        "if rank: dist.new_group([0, 1])\ndist.barrier()",
        launch.RanksHung,
        ["never would have", "new_group([0, 1]): rank 1 arrived, rank 0 never arrived"],
    ),
]
# Other systems can't tell which dtype the dead rank's tensor had.
if sys.platform == "linux":
    TABLE.append(
        Fault(
            "different dtypes",
            "dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))",
            launch.RankDied,
            [
                "SIGABRT",
                "Mismatch in all_reduce",
                "rank 0 passes [[4]] Float; rank 1 passes [[4]] Double",
            ],
            first_look_s=30.0,  # gloo aborts a rank, but on a busy machine not at once
        )
    )


@pytest.fixture(autouse=True)
def _early_looks(monkeypatch):
    monkeypatch.setattr(launcher, "FIRST_LOOK_S", EARLY_S)


@pytest.fixture(scope="module")
def others():
    """Processes that tests in other files keep running."""
    return psutil.Process().children(recursive=True)


def left_behind(others):
    """Return new processes (except the forkserver and its tracker), folders and shared memory."""
    servers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    own = psutil.Process()
    children = [p for p in own.children() if not any(s in " ".join(p.cmdline()) for s in servers)]
    ranks = [q for p in own.children() for q in p.children(recursive=True)]
    folders = list(Path(tempfile.gettempdir()).glob(f"launch-{os.getpid()}-*"))
    shared = [p.name for p in Path("/dev/shm").glob(f"*_{os.getpid()}_*")]
    return [p for p in children + ranks if p not in others] + folders + shared


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name)
def test_every_fault_in_a_rank_is_reported_and_leaves_nothing_behind(fault, others, monkeypatch):
    monkeypatch.setattr(launcher, "FIRST_LOOK_S", fault.first_look_s)
    body = "\n    ".join(fault.body.strip("\n").split("\n"))
    function = cell(f"def main(rank, world_size):\n    {body}")["main"]
    with pytest.raises(fault.error) as caught:
        launch.run(function, fault.nprocs, timeout_s=fault.timeout_s)
    message = str(caught.value)
    for phrase in fault.phrases:
        assert phrase in message
    for phrase in fault.absent:
        assert phrase not in message
    assert left_behind(others) == []


def test_the_errors_cause_is_the_ranks_own_exception():
    function = cell("def main(rank, world_size): raise KeyError('weights')")["main"]
    with pytest.raises(launch.RankRaised) as caught:
        launch.run(function, 2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("weights",)


def test_output_printed_before_a_fault_is_shown(capsys):
    function = cell(
        """
        def main(rank, world_size):
            print("one before", end="")
            sys.stdout.flush()
            os._exit(1)
        """
    )["main"]
    with pytest.raises(launch.RankDied):
        launch.run(function, 1)
    assert capsys.readouterr().out == "[rank 0] one before\n"


def test_the_stop_button_terminates_the_ranks_and_says_where_they_were(capsys, others, tmp_path):
    function = cell(
        """
        def main(rank, world_size, folder):
            (folder / str(rank)).touch()
            if rank == 0:
                dist.barrier()
            time.sleep(1000)
        """
    )["main"]

    def stop():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    # A shell makes background processes, including tests, ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch.run(function, 2, tmp_path)
    finally:
        stopper.join()
        signal.signal(signal.SIGINT, before)
    shown = capsys.readouterr().out
    assert "Stopped. Where the ranks were:" in shown
    assert "rank 1 is at" in shown
    assert left_behind(others) == []


def test_a_thread_that_outlives_the_function_is_reported(monkeypatch, others):
    source = """
    def main(rank, world_size):
        if rank:
            threading.Thread(target=time.sleep, args=(1000,)).start()
        return rank
    """
    monkeypatch.setattr(launcher, "RELEASE_LIMIT_S", 0.5)
    with pytest.warns(
        UserWarning,
        match="rank 1 had not exited: something else, such as a thread, was still running",
    ):
        assert launch.run(cell(source)["main"], 2) == [0, 1]
    assert left_behind(others) == []


def test_a_run_after_a_failed_one_works():
    names = cell(
        """
        def fails(rank, world_size): os._exit(1)
        def works(rank, world_size): return rank
        """
    )
    with pytest.raises(launch.RankDied):
        launch.run(names["fails"], 2)
    assert launch.run(names["works"], 2) == [0, 1]


def test_ranks_that_fail_while_being_asked_for_their_state_report_their_error(monkeypatch):
    """The launcher looks for hangs after half a second, which is when short functions fail."""
    ask = RankProcesses.ask_states

    def until_all_have_failed(processes, time_s):
        while any(rank.outcome is None for rank in processes.ranks):
            processes.listen(time.monotonic() + 1)
        return ask(processes, time_s)

    monkeypatch.setattr(launcher, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(RankProcesses, "ask_states", until_all_have_failed)
    fails = cell("def main(rank, world_size): raise ValueError(rank)")["main"]
    with pytest.raises(launch.RankRaised, match="ValueError"):
        launch.run(fails, 2)
