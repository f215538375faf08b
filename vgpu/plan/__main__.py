"""Plan the training of a transformer on a cluster, or a server of one, without the cluster.

PyTorch's own FSDP2 and tensor parallelism run as one rank of it on virtual GPUs, or as one of each
kind of stage in a pipeline: bytes are counted, time is virtual. It needs no GPU.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

import vgpu
from vgpu.plan import serving
from vgpu.plan.experts import ExpertSizes
from vgpu.plan.layout import RECOMPUTE, REDUCE, Layout, split_layers
from vgpu.plan.layout_search import search
from vgpu.plan.pipelines import PipelineStep, predict
from vgpu.plan.plan import Plan, Step
from vgpu.plan.transformer import LLAMA, MIXTRAL, TransformerSizes
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

  sequences of 131,072 tokens, each shared by 4 GPUs; products in float8
    python -m vgpu.plan --model 8B --dp-shard 2 --cp 4 --sequence 131072 --float8 --recompute full

  Mixtral 8x7B on 64: each GPU has one of a block's experts
    python -m vgpu.plan --model 8x7B --dp-shard 64 --ep 8 --batch 2 --recompute full

  a model of your own: Llama 8B with other sizes
    python -m vgpu.plan --layers 24 --width 2048 --heads 16 --key-value-heads 16 \\
        --feed-forward 5504 --vocabulary 32000 --dp-shard 16 --gpu A100 --trace step.json

  70B as a server on four GPUs, in float8: how many users, how fast
    python -m vgpu.plan --serve --model 70B --tp 4 --weight-bits 8 --cache-bits 8 --prompt 1000
"""

MODELS = LLAMA | MIXTRAL
_SIZES = {
    "layers": "transformer blocks",
    "width": "of the hidden states",
    "heads": "of attention",
    "key_value_heads": "of attention",
    "feed_forward": "width inside a block's feed-forward part",
    "vocabulary": "tokens that there are",
}
_EXPERTS = {
    "experts": ("count", int, "of each block, in place of its feed-forward part"),
    "experts_per_token": ("per_token", int, "that a token goes through (default: 2)"),
    "expert_width": ("width", int, "inside an expert (default: that of the feed-forward part)"),
    "shared_width": (
        "shared_width",
        int,
        "inside one that all tokens go through (default: 0, none)",
    ),
    "dense_layers": ("dense_layers", int, "blocks in front without experts (default: 0)"),
    "capacity": (
        "capacity",
        float,
        "slots of an expert for each token that it gets if all get as many (default: 1, which is also "
        "dropless training with a balanced router)",
    ),
    "ranks_per_token": (
        "ranks_per_token",
        int,
        "of ep on which a token's experts may be, to each of which it's sent once (default: any, and it's "
        "sent once for each expert)",
    ),
}
_LAYOUT = {
    "dp_replicate": "replicas: data parallelism with whole copies of the model",
    "dp_shard": "ranks among which FSDP2 shards the parameters of a replica",
    "tp": "neighboring ranks that share each layer: tensor parallelism",
    "pp": "pipeline stages; embedding and output count as a layer each when it is cut",
    "ep": "of the ranks of dp-shard and context, neighbors that have different experts",
    "cp": "ranks that share each sequence: context parallelism, also --context",
}
_ALSO = {"cp": ["--context"]}
_COUNTS = {
    "batch": f"sequences a step on each rank that has samples of its own (default: {Plan.batch})",
    "sequence": "tokens of a sequence (default: the model's, 8192 for those of Llama)",
    "gpus_per_host": f"GPUs of a host (default: {Plan.gpus_per_host})",
    "chunks": "stages of each rank in a pipeline: 1 for 1F1B, more for interleaved 1F1B "
    f"(default: {Plan.chunks})",
    "recompute_every": f"of so many blocks, one is recomputed (default: {Plan.recompute_every})",
    "accumulate": "times that a step computes the batch before it updates, without a pipeline "
    f"(default: {Plan.accumulate})",
    "micro_batches": "into which a pipeline divides the batch (default: as many as stages)",
}
_SEARCH = {
    "hosts": "of the cluster, in place of a layout",
    "sequences": "most sequences a step, on all GPUs together",
}
_COSTS = ("arithmetic_share", "fuses", "async_tp")
_SEARCHED = ("batch", "recompute", "reshard_after_forward", "trace")
"""What has no place beside ``--search``."""
_SERVE = {
    "weight_bits": "of a weight of the blocks: 8 is float8 (default: 16)",
    "cache_bits": "of a cached number (default: 16)",
    "prompt": "tokens of each prompt (default: 1024)",
    "output": "tokens of each answer (default: 256)",
}
_SERVED = {"model", *_SIZES, "tp", "pp", "gpu", "gpus_per_host", "network", "arithmetic_share"}
"""What else belongs to ``--serve``."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m vgpu.plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    result.add_argument(
        "--model", choices=MODELS, help="sizes of Llama 3.1 or Mixtral (default: 8B)"
    )
    _add_counts(result, "sizes that differ from the model's", _SIZES)
    experts = result.add_argument_group("experts, if there are any or the model's differ")
    for name, (_, kind, text) in _EXPERTS.items():
        metavar = "N" if kind is int else "X"
        experts.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    _add_counts(result, "layout (each 1 by default; GPUs are the product of all but ep)", _LAYOUT)
    step = _add_counts(result, "step and cluster", _COUNTS)
    step.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        help="activation checkpointing, what backward computes again: nothing, all but attention and "
        f"every second matrix product, or all (default: {Plan.recompute})",
    )
    step.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        help="whether parameters are freed after forward, and gathered again for backward "
        f"(default: {Plan.reshard_after_forward})",
    )
    step.add_argument(
        "--reduce",
        choices=REDUCE,
        help=f"type in which gradients are reduced among ranks (default: {Plan.reduce})",
    )
    step.add_argument(
        "--wrap-ends",
        action="store_true",
        help="FSDP2 shards embedding and output in their own right, as notebooks/train.py does",
    )
    step.add_argument(
        "--float8",
        action="store_true",
        help="linear layers of blocks multiply in float8, with one scale for each tensor",
    )
    step.add_argument(
        "--compile",
        action="store_true",
        dest="fuses",
        help="elementwise operations fuse, as torch.compile has it",
    )
    step.add_argument(
        "--async-tp",
        action="store_true",
        help="with --compile: products run in pieces beside those of the collectives among ranks of "
        "a host that share them (asynchronous tensor parallelism)",
    )
    step.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"of every host: {', '.join(vgpu.PRESETS)} (default: {Plan.gpu}), or FILE.toml with the "
        "fields of vgpu.GPUSpec that differ from those of the one that like = NAME names",
    )
    step.add_argument(
        "--network",
        metavar="NAME",
        help=f"between hosts: {', '.join(vgpu.NETWORKS)} (default: {Plan.network}), or FILE.toml as for "
        "vgpu.Network",
    )
    step.add_argument(
        "--arithmetic-share",
        type=float,
        metavar="X",
        help="of a datasheet's FLOP/s that matrix products reach (default: "
        f"{vgpu.CostModel.arithmetic_share})",
    )
    step.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write the step for ui.perfetto.dev"
    )
    several = _add_counts(
        result, "search among all layouts, batches and ways to recompute", _SEARCH
    )
    several.add_argument(
        "--search",
        action="store_true",
        help="print the fastest that fit; pipelines are not tried",
    )
    serve = _add_counts(result, "a server of the model, not its training", _SERVE)
    serve.add_argument(
        "--serve",
        action="store_true",
        help="whether weights and KV cache fit on tp × pp GPUs, and how fast it generates",
    )
    return result


def _add_counts(parser: argparse.ArgumentParser, title: str, texts: dict[str, str]) -> Any:
    group = parser.add_argument_group(title)
    for name, text in texts.items():
        options = [f"--{name.replace('_', '-')}", *_ALSO.get(name, ())]
        group.add_argument(*options, dest=name, type=int, metavar="N", help=text)
    return group


def main(arguments: list[str] | None = None) -> None:
    given = vars(parser().parse_args(arguments))
    try:
        if given.pop("search", False):
            print(_searched(given))
        elif given.pop("serve", False):
            print(_served(given))
        else:
            _refuse(_SEARCH, given, "only of use with --search")
            _refuse(_SERVE, given, "only of use with --serve")
            _predict_and_print(given)
    except (ValueError, OSError) as error:
        print(f"python -m vgpu.plan: error: {error}", file=sys.stderr)
        sys.exit(2)


def _predict_and_print(given: dict[str, Any]) -> None:
    trace = given.pop("trace", None)
    plan, costs = plan_of(given)
    step = predict(plan, **costs)
    print(report(step))
    if trace:
        step.timeline.to_chrome_trace(trace)
        print(f"\nThe step is in {trace}; https://ui.perfetto.dev opens it.")
    if not step.fits:
        print(f"\n{remedies(step, costs)}")


def plan_of(given: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan that the options name, and costs as ``predict`` takes them."""
    own = {name: value for name, value in given.items() if name in _SIZES}
    sizes = dataclasses.replace(MODELS[given.get("model", "8B")], **own)
    sizes = dataclasses.replace(sizes, experts=_experts(sizes, given))
    layout = Layout(**{name: value for name, value in given.items() if name in _LAYOUT})
    costs = {name: value for name, value in given.items() if name in _COSTS}
    if costs.get("async_tp") and not costs.get("fuses"):
        raise ValueError("--async-tp is a pass of torch.compile: give --compile with it")
    elsewhere = {"model", *_SIZES, *_EXPERTS, *_LAYOUT, *_COSTS}
    others = {name: value for name, value in given.items() if name not in elsewhere}
    return Plan(sizes, layout, **others), costs


def _experts(sizes: TransformerSizes, given: dict[str, Any]) -> ExpertSizes | None:
    """Those of the model, with the options' changes."""
    own = {_EXPERTS[name][0]: value for name, value in given.items() if name in _EXPERTS}
    if sizes.experts is not None:
        return dataclasses.replace(sizes.experts, **own)
    if not own:
        return None
    if "count" not in own:
        raise ValueError(
            "a model of so many layers without experts: give --experts, how many there are"
        )
    return ExpertSizes(**{"per_token": 2, "width": sizes.feed_forward} | own)


def _searched(given: dict[str, Any]) -> str:
    _refuse(_SEARCHED, given, "only of use without --search")
    hosts, sequences = given.pop("hosts", None), given.pop("sequences", None)
    plan, costs = plan_of(given)
    if hosts is not None:
        if hosts < 1:
            raise ValueError(f"--hosts must be at least 1, got {hosts}")
        cp, ep = plan.layout.cp, plan.layout.ep
        if plan.layout.ranks > cp:
            raise ValueError(f"--hosts {hosts} beside a layout ({plan.layout}): give one of them")
        layout = Layout(dp_shard=hosts * plan.gpus_per_host // cp, cp=cp, ep=ep)
        plan = dataclasses.replace(plan, layout=layout)
    return f"{search(plan, sequences, **costs)}\n\nVirtual time, a model's prediction."


def _served(given: dict[str, Any]) -> str:
    known = _SERVED | _SERVE.keys()
    _refuse([name for name in given if name not in known], given, "of no use with --serve")
    own = {name: value for name, value in given.items() if name in _SIZES}
    sizes = dataclasses.replace(LLAMA[given.get("model", "8B")], **own)
    degrees = {name: given[name] for name in ("tp", "pp", *_SERVE) if name in given}
    lengths = degrees.pop("prompt", 1024), degrees.pop("output", 256)
    rates = ("gpu", "gpus_per_host", "network", "arithmetic_share")
    costs: dict[str, Any] = {name: given[name] for name in rates if name in given}
    cost = serving.DEFAULT_COST.changed(costs)
    server = serving.Server(sizes, cost=cost, **degrees)
    return serving.report(server, *lengths)


def _refuse(names: Iterable[str], given: dict[str, Any], why: str) -> None:
    if found := [f"--{name.replace('_', '-')}" for name in names if name in given]:
        raise ValueError(f"{', '.join(found)}: {why}")


def report(step: Step) -> str:
    """The plan, whether it fits, and where its bytes and seconds go, as text."""
    plan = step.plan
    head = (
        f"{plan.layout} on {plan.layout.ranks} {plan.spec.name.removeprefix('Virtual ')}, "
        f"{plan.hosts} {'host' if plan.hosts == 1 else 'hosts'}"
    )
    whose = "rank 0"
    if isinstance(step, PipelineStep):
        head += f"\n{_pipeline(plan)}"
        rank = step.timeline.ranks[step.stage]
        whose = f"rank {rank}, the fullest, with {step.in_flight} micro-batches in flight"
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
            str(Table((f"bytes of {whose}", ""), bytes_rows)),
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


def remedies(step: Step, costs: dict[str, Any]) -> str:
    """Changes that make it fit, fastest first, each tried on the cluster; text to print.

    If no single one does, each is tried together with full recomputation and with parameters that are
    gathered again.
    """
    plan, single = step.plan, _changes(step.plan)
    least = {"recompute": RECOMPUTE[-1], "reshard_after_forward": True}
    least = {name: value for name, value in least.items() if getattr(plan, name) != value}
    others = [change for change in single if not change.keys() & least.keys()]
    for changes in (single, [least | change for change in ({}, *others)] if least else []):
        rows = []
        for change in tqdm(changes, desc="looking for what fits", leave=False):
            try:
                tried = predict(_changed(plan, change), **costs)
            except ValueError:  # batch, heads or hosts do not divide so
                continue
            if tried.fits:
                rows.append((tried.tokens_per_s, _options(change), tried.reserved_bytes))
        if rows:
            table = [
                (text, format_bytes(size), f"{speed:,.0f}")
                for speed, text, size in sorted(rows, reverse=True)
            ]
            return str(Table(("what would fit", "reserved", "tokens/s a GPU"), table))
    return (
        "None of what was tried makes it fit: smaller batches, more sharing, recomputation, "
        "parameters gathered again. Use more GPUs."
    )


def _changes(plan: Plan) -> list[dict[str, Any]]:
    """Options that keep less, one at a time."""
    layout = plan.layout
    changes: list[dict[str, Any]] = [
        {"recompute": how} for how in RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :]
    ]
    if layout.dp_shard > 1 and not plan.reshard_after_forward:
        changes.append({"reshard_after_forward": True})
    if plan.batch > 1:
        changes.append({"batch": plan.batch // 2})
    if layout.pp > 1:
        changes.append({"micro_batches": 2 * plan.schedule.micro_batches})
    if layout.dp_replicate > 1:
        changes.append({"dp_replicate": 1, "dp_shard": layout.dp})
    for by in (2, 4, 8):
        if layout.dp_shard % by == 0 and layout.tp * by <= plan.gpus_per_host:
            # Ranks that had samples of their own now share a layer and all of their samples.
            shared = {"dp_shard": layout.dp_shard // by, "tp": layout.tp * by}
            changes.append({**shared, "batch": plan.batch * by})
    return changes


def _changed(plan: Plan, change: dict[str, Any]) -> Plan:
    degrees = {name: value for name, value in change.items() if name in _LAYOUT}
    others = {name: value for name, value in change.items() if name not in _LAYOUT}
    return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, **degrees), **others)


def _options(change: dict[str, Any]) -> str:
    """Such as "--recompute full --reshard-after-forward"."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in change.items()
    )


if __name__ == "__main__":
    main()
