"""Plan the training of a transformer on a cluster, without the cluster.

PyTorch's own FSDP2 and tensor parallelism run as one rank of it on virtual GPUs, or as one of each
kind of stage in a pipeline: bytes are counted, time is virtual. It needs no GPU.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

import vgpu
from vgpu.plan.layout import Layout, split_layers
from vgpu.plan.layout_search import search
from vgpu.plan.parallelize import RECOMPUTE
from vgpu.plan.plan import Plan, Step
from vgpu.plan.rank import predict
from vgpu.plan.transformer import LLAMA
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

EXAMPLES = """\
examples:
  Llama 3.1 8B, its parameters sharded over 128 H100s
    python -m vgpu.plan --model 8B --dp-shard 128 --batch 2 --recompute selective

  70B on 256: tensor parallelism inside each host, shards across hosts
    python -m vgpu.plan --model 70B --dp-shard 32 --tp 8 --batch 16 --recompute full

  70B on 32 in a pipeline of 4 stages, interleaved: two chunks of layers on each rank
    python -m vgpu.plan --model 70B --pp 4 --chunks 2 --tp 8 --batch 8 --recompute full

  every layout of 70B on 8 hosts, at most 512 sequences a step: which fit, and the fastest
    python -m vgpu.plan --search --model 70B --hosts 8 --sequences 512

  a model of your own: Llama 8B with other sizes
    python -m vgpu.plan --layers 24 --width 2048 --heads 16 --key-value-heads 16 \\
        --feed-forward 5504 --vocabulary 32000 --dp-shard 16 --gpu A100 --trace step.json
"""

_SIZES = {
    "layers": "transformer blocks",
    "width": "of the hidden states",
    "heads": "of attention",
    "key-value-heads": "of attention",
    "feed-forward": "width inside a block's feed-forward part",
    "vocabulary": "tokens that there are",
}
_LAYOUT = {
    "dp-replicate": "replicas: data parallelism with whole copies of the model",
    "dp-shard": "ranks among which FSDP2 shards the parameters of a replica",
    "tp": "neighboring ranks that share each layer: tensor parallelism",
    "pp": "pipeline stages; embedding and output count as a layer each when it is cut",
}
_COUNTS = {
    "batch": "sequences a step on each rank that has samples of its own",
    "sequence": "tokens of a sequence",
    "gpus-per-host": "GPUs of a host",
    "chunks": "stages of each rank in a pipeline: 1 for 1F1B, more for interleaved 1F1B",
    "micro-batches": "into which a pipeline divides the batch",
}
_UNLESS_GIVEN = {
    "sequence": "the model's, 8192 for those of Llama",
    "micro-batches": "as many as stages",
}
_COSTS = {
    "arithmetic_share": "arithmetic_share",
    "speed_spread": "speed_spread",
    "compile": "fuses",
    "async_tp": "async_tp",
}
_SEARCH = {
    "hosts": "of the cluster, in place of a layout",
    "sequences": "most sequences a step, on all GPUs together",
    "whole": "how many of the fastest are predicted whole, the allocator included",
    "processes": "that try plans at once (default: as many as cores and memory allow)",
}
_SEARCHED = ("batch", "recompute", "reshard_after_forward")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m vgpu.plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--model", choices=LLAMA, help="sizes of Llama 3.1 (default: 8B)")
    sizes = result.add_argument_group("sizes that differ from the model's")
    _add_counts(sizes, _SIZES)
    layout = result.add_argument_group(
        "layout (each 1 by default; GPUs are the product of the four)"
    )
    _add_counts(layout, _LAYOUT)
    step = result.add_argument_group("step and cluster")
    _add_counts(
        step,
        {
            name: f"{text} (default: {_UNLESS_GIVEN.get(name) or _default(name.replace('-', '_'))})"
            for name, text in _COUNTS.items()
        },
    )
    step.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        help="activation checkpointing, what backward computes again: nothing, all but attention and "
        f"every second matrix product, or all (default: {_default('recompute')})",
    )
    step.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether parameters are freed after forward, and gathered again for backward "
        f"(default: {_default('reshard_after_forward')})",
    )
    step.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="elementwise operations fuse, as torch.compile has it",
    )
    step.add_argument(
        "--async-tp",
        action="store_true",
        default=None,
        help="with --compile: products run in pieces beside those of the collectives among ranks of "
        "a host that share them (asynchronous tensor parallelism)",
    )
    step.add_argument(
        "--gpu",
        choices=vgpu.PRESETS,
        metavar="NAME",
        help=f"of every host: {', '.join(vgpu.PRESETS)} (default: {_default('gpu')})",
    )
    step.add_argument(
        "--network",
        choices=vgpu.NETWORKS,
        metavar="NAME",
        help=f"between hosts: {', '.join(vgpu.NETWORKS)} (default: {_default('network')})",
    )
    step.add_argument(
        "--arithmetic-share",
        type=float,
        metavar="X",
        help="of a datasheet's FLOP/s that matrix products reach (default: "
        f"{vgpu.CostModel(vgpu.get_spec('H100')).arithmetic_share})",
    )
    step.add_argument(
        "--speed-spread",
        type=float,
        metavar="X",
        help="standard deviation of the GPUs' speeds in arithmetic; the slowest sets the pace "
        "(default: 0; 0.016 was measured)",
    )
    step.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write the step for ui.perfetto.dev"
    )
    several = result.add_argument_group("search among all layouts, batches and ways to recompute")
    several.add_argument(
        "--search",
        action="store_true",
        help="print the fastest that fit; pipelines are not tried",
    )
    _add_counts(several, _SEARCH)
    return result


def _add_counts(group: Any, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(Plan) if field.name == name)


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        if options.search:
            print(_searched(options))
            return
        plan, costs = plan_of(options)
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


def plan_of(options: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    """The plan that the options name, and costs as ``predict`` takes them."""
    values = {name: value for name, value in vars(options).items() if value is not None}
    unused = ("trace", *_SEARCHED) if values.pop("search") else _SEARCH
    if names := [f"--{name.replace('_', '-')}" for name in unused if name in values]:
        raise ValueError(f"{', '.join(names)}: only of use with{'out' * options.search} --search")
    for name in ("trace", *_SEARCH):
        values.pop(name, None)
    sizes = dataclasses.replace(LLAMA[values.pop("model", "8B")], **_popped(values, _SIZES))
    layout = Layout(**_popped(values, _LAYOUT))
    costs = {cost: values.pop(name) for name, cost in _COSTS.items() if name in values}
    if costs.get("async_tp") and not costs.get("fuses"):
        raise ValueError("--async-tp is a pass of torch.compile: give --compile with it")
    return Plan(sizes, layout, **values), costs


def _popped(values: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    names = [name.replace("-", "_") for name in texts]
    return {name: values.pop(name) for name in names if name in values}


def _searched(options: argparse.Namespace) -> str:
    own = {name: getattr(options, name) for name in _SEARCH if getattr(options, name) is not None}
    plan, costs = plan_of(options)
    if (hosts := own.pop("hosts", None)) is not None:
        if hosts < 1:
            raise ValueError(f"--hosts must be at least 1, got {hosts}")
        if plan.layout.ranks > 1:
            raise ValueError(f"--hosts {hosts} beside a layout ({plan.layout}): give one of them")
        layout = Layout(dp_shard=hosts * plan.gpus_per_host)
        plan = dataclasses.replace(plan, layout=layout)
    return f"{search(plan, **own, **costs)}\n\nVirtual time, a model's prediction."


def report(step: Step) -> str:
    """The plan, whether it fits, and where its bytes and seconds go, as text."""
    plan = step.plan
    head = (
        f"{plan.layout} on {plan.layout.ranks} {plan.spec.name.removeprefix('Virtual ')}, "
        f"{plan.hosts} {'host' if plan.hosts == 1 else 'hosts'}"
    )
    if plan.layout.pp > 1:
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
            f"utilization {step.utilization:.1%}. Virtual time, a model's prediction.",
        ]
    )


def _pipeline(plan: Plan) -> str:
    """The schedule, and how the layers were cut."""
    counts = [part.layers for part in split_layers(plan.sizes.layers, plan.layout.pp * plan.chunks)]
    runs = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    cut = ", ".join(f"{times} × {n}" if times > 1 else str(n) for n, times in runs)
    return (
        f"{plan.schedule.name}: {plan.schedule.micro_batches} micro-batches of {plan.micro_batch} "
        f"on each; layers of the stages: {cut}"
    )


def _whose(step: Step) -> str:
    if step.plan.layout.pp == 1:
        return f"rank {step.plan.slowest().rank}"
    rank = step.timeline.ranks[step.stage]
    return f"rank {rank}, the fullest, with {step.in_flight} micro-batches in flight"


def remedies(step: Step, costs: dict[str, Any]) -> str:
    """Changes that make it fit, fastest first, each tried on the cluster; text to print.

    If no single one does, each is tried together with full recomputation, then also with parameters
    that are gathered again.
    """
    for added, plan in _keeping_less(step.plan):
        tried = [
            (f"{added} {text}".strip(), predict(other, **costs))
            for text, other in tqdm(list(_changes(plan)), desc="looking for what fits", leave=False)
        ]
        rows = [
            (text, format_bytes(other.reserved_bytes), f"{other.tokens_per_s:,.0f}")
            for text, other in sorted(tried, key=lambda one: -one[1].tokens_per_s)
            if other.fits
        ]
        if rows:
            return str(Table(("what would fit", "reserved", "tokens/s a GPU"), rows))
    return (
        "None of what was tried makes it fit: smaller batches, more sharing, recomputation, "
        "parameters gathered again. Use more GPUs."
    )


def _keeping_less(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan, then with what it lacks of all that keeps less: one option, then both."""
    yield "", plan
    added = []
    if plan.recompute != RECOMPUTE[-1]:
        plan = dataclasses.replace(plan, recompute=RECOMPUTE[-1])
        added.append(f"--recompute {plan.recompute}")
        yield " ".join(added), plan
    if not plan.reshard_after_forward:
        added.append("--reshard-after-forward")
        yield " ".join(added), dataclasses.replace(plan, reshard_after_forward=True)


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for how in RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :]:
        yield f"--recompute {how}", dataclasses.replace(plan, recompute=how)
    if plan.layout.dp_shard > 1 and not plan.reshard_after_forward:
        yield "--reshard-after-forward", dataclasses.replace(plan, reshard_after_forward=True)
    yield from _spread(plan)


def _spread(plan: Plan) -> Iterator[tuple[str, Plan]]:
    layout = plan.layout
    count = plan.schedule.micro_batches if layout.pp > 1 else 1
    if plan.batch // 2 and plan.batch // 2 % count == 0:
        half = plan.batch // 2
        yield f"--batch {half}", dataclasses.replace(plan, batch=half)
    if layout.pp > 1 and plan.batch % (2 * count) == 0:
        yield f"--micro-batches {2 * count}", dataclasses.replace(plan, micro_batches=2 * count)
    if layout.dp_replicate > 1:
        dp_shard = layout.dp
        divided = dataclasses.replace(layout, dp_replicate=1, dp_shard=dp_shard)
        yield f"--dp-replicate 1 --dp-shard {dp_shard}", dataclasses.replace(plan, layout=divided)
    for by in (2, 4, 8):
        if layout.dp_shard % by or layout.tp * by > plan.gpus_per_host:
            continue
        shared = dataclasses.replace(layout, dp_shard=layout.dp_shard // by, tp=layout.tp * by)
        try:
            # Ranks that had samples of their own now share a layer and all of their samples.
            other = dataclasses.replace(plan, layout=shared, batch=plan.batch * by)
        except ValueError:
            continue  # the model's heads do not divide so
        yield f"--dp-shard {shared.dp_shard} --tp {shared.tp} --batch {other.batch}", other


if __name__ == "__main__":
    main()
