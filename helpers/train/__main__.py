"""Train a small network on one process, with torchrun, or on several hosts.

The digits of lesson 07, or the GPT of lesson 12, started outside a notebook; with DDP, or divided
by FSDP2 and tensor parallelism. It needs no download and no GPU.
"""

import argparse
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from helpers.train.checkpoints import CheckpointError
from helpers.train.tasks import DEFAULTS, DTYPES, TASKS, Settings
from helpers.train.training import Training
from vgpu.launch import launcher
from vgpu.plan.layout import KINDS, named_layout

JOIN_LIMIT = timedelta(minutes=5)
"""For all ranks to join; importing torch takes a while on a busy machine."""

EXAMPLES = """\
examples:
  one process
    python -m helpers.train

  two ranks on this machine, restarted from the last checkpoint if one of them is lost
    torchrun --nproc-per-node 2 --max-restarts 3 -m helpers.train --checkpoints run

  see that happen: rank 1 is killed before step 150
    torchrun --nproc-per-node 2 --max-restarts 3 -m helpers.train --checkpoints run --lose 1:150

  the GPT, its parameters divided among four ranks
    torchrun --nproc-per-node 4 -m helpers.train --model gpt --parallel fsdp

  two hosts with two GPUs each: the same command on both; DIR is a folder that both can read
    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \\
      --rdzv-endpoint HOST0:29500 --rdzv-id digits -m helpers.train --checkpoints DIR/run

Give the same command again to continue from the last checkpoint. On as many ranks with as many
threads, the result is bit for bit that of a run that was never stopped. On another number of ranks,
or with another --parallel, it goes on from there, too.
"""


class Parser(argparse.ArgumentParser):
    """Every rank reads the same command line; only rank 0 prints anything about it."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog="python -m helpers.train",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = result.add_argument_group("what is trained")
    where = result.add_argument_group("where, and how it is kept")

    def number(name: str, kind: Any, text: str) -> None:
        shown = {model: getattr(default, name) for model, default in DEFAULTS.items()}
        option = f"--{name.replace('_', '-')}"
        metavar = "N" if isinstance(shown["digits"], int) else "X"
        alike = len(set(shown.values())) == 1
        words = shown["digits"] if alike else ", ".join(f"{m} {v}" for m, v in shown.items())
        what.add_argument(option, type=kind, metavar=metavar, help=f"{text} (default: {words})")

    what.add_argument(
        "--model",
        choices=TASKS,
        default="digits",
        help="a convolutional network that reads digits, or a GPT that learns to write from Python's "
        "own documentation (default: %(default)s)",
    )

    number("epochs", _count, "passes over the training samples")
    number("batch_size", _count, "samples a step, on all ranks together")
    number("learning_rate", _positive, "at the first step; it decreases linearly to zero")
    number("momentum", _fraction, "of SGD")
    number("dropout", _fraction, "share of activations that are dropped; each rank draws its own")
    number("width", _count, "channels of the first layer")
    number("seed", _whole, "for the initial parameters and the order of the samples")
    what.add_argument(
        "--precision",
        choices=DTYPES,
        help="in double, any number of ranks gives the same parameters to about 1e-12; in single, "
        "differences in rounding grow (default: digits double, gpt single)",
    )
    where.add_argument(
        "--parallel",
        choices=KINDS,
        default="ddp",
        help="what the ranks share: nothing but gradients (ddp), all parameters (fsdp), those of each "
        "host's copy (hsdp; two copies on one host), each layer (tp), or each layer and then the "
        "parameters (fsdp+tp) (default: %(default)s)",
    )
    where.add_argument(
        "--tensor-ranks",
        type=_count,
        default=2,
        metavar="N",
        help="ranks that share a layer in fsdp+tp (default: %(default)s)",
    )
    where.add_argument(
        "--checkpoints",
        type=_folder,
        metavar="FOLDER",
        help="resume from the last checkpoint there, and write new ones, of which two are kept; all "
        "hosts must share it (default: none are written)",
    )
    where.add_argument(
        "--save-every",
        type=_count,
        metavar="N",
        help="steps between checkpoints (default: one epoch)",
    )
    where.add_argument(
        "--threads",
        type=_count,
        metavar="N",
        help="CPU threads of each rank (default: its share of the cores)",
    )
    where.add_argument(
        "--cpu", action="store_true", help="compute on CPUs, even with a GPU for each rank"
    )
    where.add_argument(
        "--lose",
        type=_loss,
        metavar="RANK:STEP",
        help="a fire drill: kill that rank before that step, unless this run was restarted or "
        "resumed",
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(options.threads or launcher.threads_per_rank(ranks_here))
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    settings = replace(DEFAULTS[options.model], **given)
    with _group(options.cpu):
        try:
            ranks = dist.get_world_size()
            layout = named_layout(
                options.parallel, ranks, max(1, ranks // ranks_here), options.tensor_ranks
            )
            training = Training(settings, options.checkpoints, options.cpu, layout)
            _check(options, training)
            _run(training, options)
        except (CheckpointError, ValueError) as error:
            _refuse(str(error))


def _check(options: argparse.Namespace, training: Training) -> None:
    if options.save_every and not options.checkpoints:
        raise ValueError("--save-every needs --checkpoints FOLDER, the folder to write into")
    if options.lose and options.lose[0] >= training.ranks:
        last = training.ranks - 1
        raise ValueError(f"--lose names rank {options.lose[0]}, and the ranks are 0 to {last}")


def _run(training: Training, options: argparse.Namespace) -> None:
    save_every = options.save_every or training.steps_per_epoch
    threads = torch.get_num_threads()
    where = {"cpu": f"CPU, threads of each: {threads}", "cuda": "GPU", "vgpu": "virtual GPU"}[
        training.device.type
    ]
    _say(training, f"{_ranks(training)} on {where}; {training.steps} steps")
    if training.resumed_from:
        _say(training, f"resumed from {training.resumed_from}")
    with tqdm(
        total=training.steps,
        initial=training.step,
        desc=_ranks(training),
        unit="step",
        # None: on a terminal only, not in a file.
        disable=None if training.rank == 0 else True,
    ) as bar:
        for inputs, targets in training.batches():
            if options.lose == (training.rank, training.step) and _is_first(training):
                os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
            loss = training.train_on(inputs, targets)
            if not bar.disable:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()
            epoch, left = divmod(training.step, training.steps_per_epoch)
            if left == 0:
                line = f"epoch {epoch} of {training.settings.epochs}: {_score(training)}"
                _say(training, line)
            last = training.step == training.steps
            if training.folder and (last or training.step % save_every == 0):
                training.save()
    _say(training, f"done: {_score(training)}")


def _is_first(training: Training) -> bool:
    """Whether this is the first start: a drill that came again each time would never end."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return restarts == "0" and training.resumed_from is None


def _ranks(training: Training) -> str:
    return "1 rank" if training.ranks == 1 else f"{training.ranks} ranks"


def _score(training: Training) -> str:
    return training.task.described(training.history[-1]) if training.history else ""


def _say(training: Training, line: str) -> None:
    if training.rank == 0:
        # Above the progress bar, not through it.
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


@contextmanager
def _group(cpu: bool) -> Iterator[None]:
    """The process group that the environment describes; without one, a group of this process."""
    backend = launcher.backend("cpu" if cpu else launcher.device_type())
    one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if one_host and (loopback := launcher.loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    rank, ranks = (int(os.environ.get(name, i)) for i, name in enumerate(("RANK", "WORLD_SIZE")))
    store = fresh_store(rank, ranks, JOIN_LIMIT) if ranks > 1 else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of MASTER_ADDR and MASTER_PORT, seen through a prefix of this round alone.

    Since PyTorch 2.5 torchrun's agent keeps one store for the whole job, restarts included. A
    restarted rank can then find the address of a peer that is dead, and both wait for half an hour
    (https://github.com/pytorch/pytorch/issues/135712). Counting restarts does not help: a host that
    has just come back counts from zero.

    So every rank says hello with a fresh token. Rank 0 announces the prefix together
    with the tokens that it has heard, again and again until all have answered: an announcement
    with one's own token cannot be an old one. Raises TimeoutError if a rank does not come.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    token = uuid.uuid4().hex
    until_s = time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", token)
    while time.monotonic() < until_s:
        if rank == 0:
            tokens = [store.get(f"hello/{other}").decode() for other in range(world_size)]
            store.set("announced", json.dumps(tokens))
        else:
            tokens = json.loads(store.get("announced"))
        if token in tokens:
            # The token of rank 0 names the round.
            prefix = tokens[0]
            store.set(f"{prefix}/{rank}", token)
            if rank != 0 or _all_there(store, prefix, tokens):
                return dist.PrefixStore(prefix, store)
        time.sleep(0.01)
    raise TimeoutError(f"rank {rank} of {world_size}: not all ranks came within {timeout}")


def _all_there(store: dist.Store, prefix: str, tokens: list[str]) -> bool:
    keys = [f"{prefix}/{rank}" for rank in range(len(tokens))]
    return store.check(keys) and [store.get(key).decode() for key in keys] == tokens


def _refuse(message: str) -> NoReturn:
    """End this rank; all ranks refuse for the same reason, and rank 0 says it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"python -m helpers.train: error: {message}", file=sys.stderr)
    sys.exit(2)


def _count(text: str) -> int:
    return _checked(text, int, lambda n: n >= 1, "a whole number from 1")


def _whole(text: str) -> int:
    return _checked(text, int, lambda n: 0 <= n < 2**63, "a whole number from 0")


def _positive(text: str) -> float:
    return _checked(text, float, lambda x: 0 < x < float("inf"), "a number above 0")


def _fraction(text: str) -> float:
    return _checked(text, float, lambda x: 0 <= x < 1, "a number from 0 and below 1")


def _checked(text: str, kind: Any, fits: Any, expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return value


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, and {text!r} is a file")
    return path


def _loss(text: str) -> tuple[int, int]:
    rank, colon, step = text.partition(":")
    if not (colon and rank.isdecimal() and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected RANK:STEP, as in 1:150, found {text!r}")
    return int(rank), int(step)


if __name__ == "__main__":
    # torchrun then reports the exception of a rank, not only its exit code.
    record(main)()
