"""Plan the training of a transformer on a cluster, without the cluster.

PyTorch's own FSDP2 and tensor parallelism run as one rank of it on virtual GPUs, or as one of each
kind of stage in a pipeline: bytes are counted, time is virtual. It needs no GPU.
"""

import argparse
import dataclasses
import itertools
import sys
import tomllib
from pathlib import Path
from typing import Any

import vgpu
from vgpu.plan.layouts import search
from vgpu.plan.parallel import Layout, parts
from vgpu.plan.rank import predict
from vgpu.plan.remedies import remedies
from vgpu.plan.step import CHECKPOINTS, Plan, Step
from vgpu.plan.transformer import LLAMA, TransformerSizes
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

EXAMPLES = """\
examples:
  Llama 3.1 8B, its parameters divided among 128 H100s
    python -m vgpu.plan --model 8B --shards 128 --batch 2 --checkpoint selective

  70B on 256: layers divided inside each host, parameters across hosts
    python -m vgpu.plan --model 70B --shards 32 --tensors 8 --batch 16 --checkpoint full

  70B on 32 in a pipeline of 4 stages, interleaved: two chunks of layers on each rank
    python -m vgpu.plan --model 70B --stages 4 --chunks 2 --tensors 8 --batch 8 --checkpoint full

  every layout of 70B on 8 hosts, at most 512 sequences a step: which fit, and the fastest
    python -m vgpu.plan --search --model 70B --hosts 8 --sequences 512

  a model of your own, from a file; options on the command line win over it
    python -m vgpu.plan --file plan.toml --trace step.json

A file has the same names as the options, and for a model of your own a table of its sizes:

    gpu = "A100"
    network = "InfiniBand HDR"
    shards = 64
    batch = 4

    [model]
    layers = 24
    width = 2048
    heads = 16
    key_value_heads = 16
    feed_forward = 5504
    vocabulary = 32000
"""

_COSTS = {
    "arithmetic_share": "arithmetic_share",
    "speed_spread": "speed_spread",
    "compile": "fuses",
    "async_tp": "async_tp",
}
_UNLESS_GIVEN = {
    "sequence": "the model's, 8192 for those of Llama",
    "micro-batches": "as many as ranks in the pipeline",
}
_SEARCH = ("hosts", "sequences", "whole", "processes")
_TRIED = ("batch", "checkpoint", "reshard_after_forward")
_LAYOUT = [field.name for field in dataclasses.fields(Layout)]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m vgpu.plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--file", type=Path, metavar="PLAN.toml", help="read options from a file")
    result.add_argument("--model", choices=LLAMA, help="sizes of Llama 3.1 (default: 8B)")
    for name, text in (
        ("replicas", "copies of the model"),
        ("shards", "ranks among which FSDP2 divides a copy's parameters"),
        ("tensors", "neighbouring ranks that share each layer"),
        ("stages", "of a pipeline; embedding and output count as a layer each when it is cut"),
    ):
        text = f"{text} (default: 1); GPUs are the product of the four"
        result.add_argument(f"--{name}", type=int, metavar="N", help=text)
    for name, text in (
        ("batch", "sequences a step on each rank that has samples of its own"),
        ("sequence", "tokens of a sequence"),
        ("gpus-per-host", "GPUs of a host"),
        ("chunks", "stages of each rank in a pipeline: 1 for 1F1B, more for interleaved 1F1B"),
        ("micro-batches", "into which a pipeline divides the batch"),
    ):
        shown = _default(name.replace("-", "_")) or _UNLESS_GIVEN[name]
        result.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default: {shown})")
    result.add_argument(
        "--checkpoint",
        choices=CHECKPOINTS,
        help="what backward computes again: nothing, all but attention and every second matrix "
        f"product, or all (default: {_default('checkpoint')})",
    )
    result.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether parameters are freed after forward, and gathered again for backward "
        f"(default: {_default('reshard_after_forward')})",
    )
    result.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="elementwise operations fuse, as torch.compile has it",
    )
    result.add_argument(
        "--async-tp",
        action="store_true",
        default=None,
        help="with --compile: products run in pieces beside those of the collectives among ranks of "
        "a host that share them (asynchronous tensor parallelism)",
    )
    result.add_argument(
        "--gpu",
        choices=vgpu.PRESETS,
        metavar="NAME",
        help=f"of every host: {', '.join(vgpu.PRESETS)} (default: {_default('gpu')})",
    )
    result.add_argument(
        "--network",
        choices=vgpu.NETWORKS,
        metavar="NAME",
        help=f"between hosts: {', '.join(vgpu.NETWORKS)} (default: {_default('network')})",
    )
    result.add_argument(
        "--arithmetic-share",
        type=float,
        metavar="X",
        help="of a datasheet's FLOP/s that matrix products reach (default: "
        f"{vgpu.CostModel(vgpu.get_spec('H100')).arithmetic_share})",
    )
    result.add_argument(
        "--speed-spread",
        type=float,
        metavar="X",
        help="standard deviation of the GPUs' speeds in arithmetic; the slowest sets the pace "
        "(default: 0; 0.016 was measured)",
    )
    result.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write the step for ui.perfetto.dev"
    )
    several = result.add_argument_group("search among all layouts, batches and checkpoints")
    several.add_argument(
        "--search",
        action="store_true",
        help="print the fastest that fit, whatever layout, batch and checkpoint a file has; pipelines "
        "are not tried",
    )
    for name, text in (
        ("hosts", "of the cluster, in place of a layout"),
        ("sequences", "most sequences a step, on all GPUs together"),
        ("whole", "how many of the fastest are predicted whole, the allocator included"),
        ("processes", "that try plans at once (default: as many as cores and memory allow)"),
    ):
        several.add_argument(f"--{name}", type=int, metavar="N", help=text)
    return result


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(Plan) if field.name == name)


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        if options.search:
            print(_searched(options))
            return
        plan, costs = _read(options)
        step = predict(plan, **costs)
        print(report(step))
        if options.trace:
            step.timeline.to_chrome_trace(options.trace)
            print(f"\nThe step is in {options.trace}; https://ui.perfetto.dev opens it.")
        if not step.fits:
            print(f"\n{remedies(step, costs)}")
    except (ValueError, OSError) as error:
        print(f"python -m vgpu.plan: error: {error}", file=sys.stderr)
        sys.exit(2)


def _searched(options: argparse.Namespace) -> str:
    own = {name: getattr(options, name) for name in _SEARCH if getattr(options, name) is not None}
    plan, costs = _read(options)
    if (hosts := own.pop("hosts", None)) is not None:
        if hosts < 1:
            raise ValueError(f"--hosts must be at least 1, got {hosts}")
        if plan.layout.ranks > 1:
            raise ValueError(f"--hosts {hosts} beside a layout ({plan.layout}): give one of them")
        layout = Layout(shards=hosts * plan.gpus_per_host)
        plan = dataclasses.replace(plan, layout=layout)
    return f"{search(plan, **own, **costs)}\n\nVirtual time, a model's prediction."


def _read(options: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    given = {name: value for name, value in vars(options).items() if value is not None}
    searches = given.pop("search")
    useless = ("trace", *_TRIED) if searches else _SEARCH
    if unused := [f"--{name.replace('_', '-')}" for name in useless if name in given]:
        raise ValueError(f"{', '.join(unused)}: only of use with{'out' * searches} --search")
    for name in ("trace", *_SEARCH):
        given.pop(name, None)
    if file := given.pop("file", None):
        given = _from_file(file) | given
    model = given.pop("model", "8B")
    sizes = _sizes(model) if isinstance(model, dict) else LLAMA[model]
    layout = Layout(**{name: given.pop(name) for name in _LAYOUT if name in given})
    costs = {cost: given.pop(name) for name, cost in _COSTS.items() if name in given}
    if costs.get("async_tp") and not costs.get("fuses"):
        raise ValueError("--async-tp is a pass of torch.compile: give --compile with it")
    plan = Plan(sizes, layout, **given)
    if isinstance(model, dict) and "sequence" in model and plan.sequence > sizes.sequence:
        raise ValueError(
            f"sequences of {plan.sequence} tokens for a model that takes {sizes.sequence}: change one, "
            "or leave sequence out of [model]"
        )
    return plan, costs


def _from_file(file: Path) -> dict[str, Any]:
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    read = {name.replace("-", "_"): value for name, value in read.items()}
    known = {f.name for f in dataclasses.fields(Plan)} - {"sizes", "layout"}
    known |= {*_LAYOUT, *_COSTS, "model"}
    if unknown := sorted(set(read) - known):
        raise ValueError(f"{file} has {', '.join(unknown)}; a plan has {', '.join(sorted(known))}")
    if isinstance(model := read.get("model"), str) and model not in LLAMA:
        raise ValueError(
            f"{file} names the model {model!r}; there are {', '.join(LLAMA)}, or a table [model] of "
            "its sizes"
        )
    for name, value in read.items():
        _check_kind(file, name, value)
    return read


def _check_kind(file: Path, name: str, value: Any) -> None:
    """Of what a number of its own does not check; counts and choices are the plan's to judge."""
    if name in ("arithmetic_share", "speed_spread"):
        wanted, right = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    elif name in ("reshard_after_forward", "compile", "async_tp"):
        wanted, right = "true or false", isinstance(value, bool)
    elif name in ("gpu", "network", "checkpoint"):
        wanted, right = "a text", isinstance(value, str)
    elif name == "model":
        wanted, right = "a text or a table of sizes", isinstance(value, str | dict)
    else:
        return
    if not right:
        raise ValueError(f"{file}: {name.replace('_', '-')} must be {wanted}, got {value!r}")


def _sizes(model: dict[str, Any]) -> TransformerSizes:
    fields = {field.name: field for field in dataclasses.fields(TransformerSizes)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if missing := sorted(needed - set(model)):
        raise ValueError(f"[model] lacks {', '.join(missing)}")
    if unknown := sorted(set(model) - set(fields)):
        raise ValueError(f"[model] has {', '.join(unknown)}; its sizes are {', '.join(fields)}")
    return TransformerSizes(**model)


def report(step: Step) -> str:
    """The plan, whether it fits, and where its bytes and seconds go, as text."""
    plan = step.plan
    head = (
        f"{plan.layout} on {plan.layout.ranks} {plan.spec.name.removeprefix('Virtual ')}, "
        f"{plan.hosts} {'host' if plan.hosts == 1 else 'hosts'}"
    )
    if plan.layout.stages > 1:
        head += f"\n{_pipeline(plan)}"
    bytes_rows = [(cause, format_bytes(size)) for cause, size in step.bytes_by_cause.items()]
    bytes_rows += [
        ("allocated at the peak", format_bytes(step.allocated_bytes)),
        ("reserved by the allocator", format_bytes(step.reserved_bytes)),
        ("a GPU has", format_bytes(plan.spec.memory_bytes)),
    ]
    time_rows = [
        (cause, format_seconds(time_s), f"{time_s / step.seconds:.1%}")
        for cause, time_s in step.time_by_cause.items()
    ]
    verdict = "It fits." if step.fits else "It does not fit."
    return "\n\n".join(
        [
            head,
            str(Table((f"bytes of {_whose(step)}", ""), bytes_rows)),
            verdict,
            str(Table((f"a step of {format_seconds(step.seconds)}", "", ""), time_rows)),
            f"{step.tokens_per_s:,.0f} tokens/s a GPU, {plan.tokens:,} tokens a step; model FLOPs "
            f"utilisation {step.utilisation:.1%}. Virtual time, a model's prediction.",
        ]
    )


def _pipeline(plan: Plan) -> str:
    """The schedule, and how the layers were cut."""
    counts = [part.layers for part in parts(plan.sizes.layers, plan.layout.stages * plan.chunks)]
    runs = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    cut = ", ".join(f"{times} × {n}" if times > 1 else str(n) for n, times in runs)
    return (
        f"{plan.schedule.name}: {plan.schedule.micro_batches} micro-batches of {plan.micro_batch} "
        f"on each; layers of the stages: {cut}"
    )


def _whose(step: Step) -> str:
    if step.plan.layout.stages == 1:
        return f"rank {step.plan.slowest().rank}"
    rank = step.timeline.ranks[step.stage]
    return f"rank {rank}, the fullest, with {step.in_flight} micro-batches in flight"


if __name__ == "__main__":
    main()
