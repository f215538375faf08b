"""Run torchtitan.train several times, on ranks forked from this process, which imports it once.

Takes a JSON file with a list of runs: the number of ranks, the rank whose output is wanted,
and torchtitan's arguments. Prints a line of JSON for each run: its exit code and output.
"""

import json
import os
import socket
import sys
import tempfile
import traceback
from multiprocessing import connection, get_context
from pathlib import Path

import torch
from torchtitan import train


def rank(number: int, count: int, port: int, arguments: list[str], output: Path) -> None:
    """Train as one of torchrun's ranks would."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    names = {"RANK": number, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in names.items()}
    torch.ones((), requires_grad=True).sin()  # a forked process needs its own autograd engine
    sys.argv = ["torchtitan.train", *arguments]
    try:
        train.main()
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run(count: int, wanted: int, arguments: list[str]) -> tuple[int, str]:
    """Return the run's exit code and its output: of one rank, or of all if one failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(count)]
        ranks = [
            get_context("fork").Process(target=rank, args=(i, count, port, arguments, output))
            for i, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
        while running := [process.sentinel for process in ranks if process.is_alive()]:
            connection.wait(running)
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
        code = int(any(process.exitcode for process in ranks))
        shown = outputs if code else [outputs[wanted]]
        return code, "".join(output.read_text("utf-8", "replace") for output in shown)


for job in json.loads(Path(sys.argv[1]).read_text("utf-8")):
    code, output = run(*job)
    print(json.dumps({"code": code, "output": output}), flush=True)
