"""Run any script with virtual GPUs: ``python -m helpers.vgpu [options] script.py [arguments]``."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from helpers.units import parse_bytes
from helpers.vgpu import cuda_words
from helpers.vgpu.device.specs import PRESETS
from helpers.vgpu.program import Setting, run_module, run_script

EXAMPLES = """\
examples:
  a script that uses torch.accelerator, or the word vgpu, on two virtual GPUs
    python -m helpers.vgpu train.py --epochs 3

  a script written for CUDA and NCCL, unchanged, on four ranks with one GPU each
    torchrun --nproc-per-node 4 -m helpers.vgpu --cuda-is-vgpu train.py

  GPUs of 16 GiB; at the end, peak bytes and collectives
    python -m helpers.vgpu --count 8 --gpu H100 --memory 16GiB --summary train.py
"""


def main(arguments: list[str] | None = None) -> None:
    """Parse the options, then become the program."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    module = None
    if options.module:
        module, *options.arguments = options.module
    elif options.script is None:
        parser().error("name a script to run, or a module with -m")
    elif not Path(options.script).is_file():
        parser().error(f"there is no script {options.script!r} in {Path.cwd()}")
    sys.argv = [module or options.script, *options.arguments]
    setting = Setting(
        count=options.count,
        gpu=options.gpu,
        memory_bytes=options.memory,
        seed=options.seed,
        cuda_folder=_folder(options.script if module is None else None)
        if options.cuda_is_vgpu
        else None,
        summary=options.summary,
    )
    if options.cuda_is_vgpu:
        sys.argv[1:] = map(cuda_words.word, sys.argv[1:])
    try:
        if module is not None:
            run_module(module, setting)
        else:
            run_script(Path(options.script), setting)
    finally:
        if os.environ.get("RANK", "0") == "0":
            for reading in cuda_words.readings:
                print(f"vgpu: {reading}", file=sys.stderr)


def _folder(script: str | None) -> str:
    """Where the program's own files are: beside the script, or below the current folder."""
    return str(Path.cwd() if script is None else Path(script).resolve().parent)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"python -m helpers.vgpu: {message}\n")


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m helpers.vgpu",
        description="Run a script with virtual GPUs, as python runs it without.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = os.environ.get("VGPU_COUNT") or os.environ.get("LOCAL_WORLD_SIZE") or "2"
    parser.add_argument(
        "--count",
        type=_count,
        default=default,
        help="how many (default: VGPU_COUNT, else one a rank under torchrun, else 2)",
    )
    parser.add_argument("--gpu", default="V100", choices=sorted(PRESETS), help="default: V100")
    parser.add_argument(
        "--memory", type=_memory, help="of each GPU, as in 16GiB (default: the GPU's own)"
    )
    parser.add_argument("--seed", type=int, help="for torch.manual_seed before the script begins")
    parser.add_argument(
        "--cuda-is-vgpu",
        action="store_true",
        help="read cuda as vgpu, and nccl as vccl, in the script and the modules beside it",
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="at the end, print each GPU's peak bytes and the collectives, for each rank",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar=("module", "arguments"),
        help="run a module, as python -m does; what follows is the module's own",
    )
    parser.add_argument("script", nargs="?", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 127:
        raise argparse.ArgumentTypeError(f"expected a number of GPUs from 1 to 127, found {text!r}")
    return int(text)


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
