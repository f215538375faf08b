"""Run any script with virtual GPUs: ``python -m vgpu [options] script.py [arguments]``."""

import argparse
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from vgpu import cuda_is_vgpu, run_program
from vgpu.hardware import NETWORKS, PRESETS
from vgpu.run_program import ProgramSettings, run_command, run_module, run_script
from vgpu.units import parse_bytes

EXAMPLES = """\
examples:
  a script that uses torch.accelerator, or the device type vgpu, on two virtual GPUs
    python -m vgpu train.py --epochs 3

  a script written for CUDA and NCCL, unchanged, on four ranks with one GPU each
    torchrun --nproc-per-node 4 -m vgpu --cuda-is-vgpu train.py

  GPUs with 16 GiB each; at the end, print peak bytes and collectives
    python -m vgpu --count 8 --gpu H100 --memory 16GiB --summary train.py

  one step as rank 0 of 8 hosts with 8 H100s each, none of which exist: virtual time and bytes
    python -m vgpu --cluster 8x8 --gpu H100 train.py
"""


def main(arguments: list[str] | None = None) -> None:
    """Parse the options, then run the program in this process."""
    options = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    # argparse keeps the -- in front of the script.
    script = options.program[options.program[:1] == ["--"] :]
    program = options.module or options.command or script
    if not program:
        parser().error("name a script to run, a module with -m, or a command with -c")
    name = program[0]
    if program is script:
        _require_script(name)
    for package in options.read + options.not_read:
        _require_package(package, Path(name).resolve().parent if program is script else Path.cwd())
    settings = ProgramSettings(
        count=options.count,
        gpu=options.gpu,
        memory_bytes=options.memory,
        seed=options.seed,
        cuda_is_vgpu=options.cuda_is_vgpu,
        read=tuple(options.read),
        not_read=tuple(options.not_read),
        summary=options.summary,
        cluster=options.cluster,
        network=options.network,
    )
    sys.argv = ["-c" if program is options.command else name, *program[1:]]
    if options.cuda_is_vgpu:
        sys.argv[1:] = map(cuda_is_vgpu.replace_in_argument, sys.argv[1:])
    is_first = run_program.is_first_process()
    try:
        if program is options.module:
            run_module(name, settings)
        elif program is options.command:
            run_command(name, settings)
        else:
            run_script(Path(name), settings)
    finally:
        has_started = not run_program.is_first_process()
        if is_first and has_started and not options.cluster:
            _report(options.cuda_is_vgpu)


def _report(cuda_is_vgpu: bool) -> None:
    """Print what was replaced and, unless the program failed, a note if it used no GPU."""
    report = run_program.end()
    for line in report.replaced():
        _print_once(line)
    unused = report.unused(cuda_is_vgpu)
    if unused and isinstance(sys.exc_info()[1], SystemExit | None):
        _print_once(unused)


def _print_once(text: str) -> None:
    """Print only on rank 0, if there are multiple ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"vgpu: {text}", file=sys.stderr)


def _require_script(name: str) -> None:
    if Path(name).is_dir():
        parser().error(f"{name!r} is a folder: name a script in it, or a module or package with -m")
    if not Path(name).is_file():
        parser().error(f"there is no script {name!r} in {Path.cwd()}")
    ours = Path(__file__).parent
    for other in (Path(name).with_name("vgpu.py"), Path(name).with_name("vgpu")):
        if other.exists() and not other.samefile(ours):
            _print_once(
                f"{other} can't be imported here, because this package is also called vgpu: "
                "rename it"
            )


def _require_package(name: str, folder: Path) -> None:
    top = name.partition(".")[0]
    if PathFinder.find_spec(top, [str(folder), *sys.path]) is None:
        parser().error(
            f"--read or --not-read names {top!r}, but there is no such package: is it installed?"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"python -m vgpu: {message}\n")


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m vgpu",
        usage="%(prog)s [options] script.py [arguments]\n"
        "       %(prog)s [options] -m module [arguments]\n"
        "       %(prog)s [options] -c command [arguments]",
        description="Run a script with virtual GPUs, but otherwise as plain python would.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = os.environ.get("VGPU_COUNT") or os.environ.get("LOCAL_WORLD_SIZE") or "2"
    parser.add_argument(
        "--count",
        type=_count,
        default=default,
        help="number of GPUs (default: VGPU_COUNT; otherwise, one per rank under torchrun, or 2)",
    )
    parser.add_argument(
        "--gpu", default="V100", choices=sorted(PRESETS), help="GPU model (default: V100)"
    )
    parser.add_argument(
        "--memory", type=_memory, help="memory per GPU, such as 16GiB (default: the GPU model's)"
    )
    parser.add_argument(
        "--seed", type=_seed, help="pass this seed to torch.manual_seed before the script starts"
    )
    parser.add_argument(
        "--cuda-is-vgpu",
        action="store_true",
        help="read cuda as vgpu, and nccl as vccl, in the program and the packages that it imports",
    )
    for name, text in (
        ("--read", "include this package or module, which is left out by default"),
        ("--not-read", "leave out this package or module"),
    ):
        text = f"with --cuda-is-vgpu, {text}"
        parser.add_argument(name, action="append", default=[], metavar="NAME", help=text)
    parser.add_argument(
        "--summary",
        action="store_true",
        help="at the end, print each rank's collectives and its GPUs' peak bytes",
    )
    parser.add_argument(
        "--cluster",
        type=_cluster,
        metavar="HOSTSxGPUS",
        help="run as rank 0 of a cluster that does not exist, such as 8x8: tensors have no values, "
        "and the program ends with a prediction after its second optimizer step",
    )
    parser.add_argument(
        "--network",
        default=ProgramSettings.network,
        choices=NETWORKS,
        metavar="NAME",
        help=f"network between the cluster's hosts: {', '.join(NETWORKS)} (default: %(default)s)",
    )
    for what in ("module", "command"):
        parser.add_argument(
            f"-{what[0]}",
            dest=what,
            nargs=argparse.REMAINDER,
            metavar="",
            help=f"run a {what}, as python -{what[0]} does, with all arguments that follow",
        )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="script.py [arguments]",
        help="the script to run, with all arguments that follow",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 127:
        is_variable = text == os.environ.get("VGPU_COUNT")
        where = " in the environment variable VGPU_COUNT" if is_variable else ""
        raise argparse.ArgumentTypeError(
            f"expected a number of GPUs from 1 to 127, got {text!r}{where}"
        )
    return int(text)


def _cluster(text: str) -> tuple[int, int]:
    hosts, _, each = text.partition("x")
    if not (hosts.isdecimal() and each.isdecimal() and int(hosts) and 1 <= int(each) <= 127):
        raise argparse.ArgumentTypeError(
            f"expected hosts x GPUs per host, up to 127, as in 8x8; got {text!r}"
        )
    return int(hosts), int(each)


def _seed(text: str) -> int:
    # The range of torch.manual_seed.
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
