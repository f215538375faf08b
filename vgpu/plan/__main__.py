"""Plan how to train or serve a transformer on a cluster that you don't have.

For training, PyTorch's own FSDP2 and tensor parallelism run on virtual GPUs, as one rank of the
cluster or, for a pipeline, as one rank of each kind of stage. Bytes are counted, time is virtual,
and no GPU is needed.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import vgpu
from vgpu.plan import serving
from vgpu.plan.experts import ExpertSizes
from vgpu.plan.layout import RECOMPUTE, REDUCE, Layout, split_layers
from vgpu.plan.layout_search import search
from vgpu.plan.pipelines import PipelineStep, predict
from vgpu.plan.plan import Plan
from vgpu.plan.recorded_step import Step
from vgpu.plan.transformer import DEEPSEEK, LLAMA, MIXTRAL, TransformerSizes
from vgpu.tables import Table
from vgpu.time.costs import check_count
from vgpu.units import format_bytes, format_seconds

EXAMPLES = """\
examples:
  Llama 3.1 8B, with its parameters sharded across 128 H100s
    python -m vgpu.plan --model 8B --dp-shard 128 --batch 2 --recompute selective

  70B on 256 GPUs: tensor parallelism within each host, sharding across hosts
    python -m vgpu.plan --model 70B --dp-shard 32 --tp 8 --batch 16 --recompute full

  70B on 32 GPUs: an interleaved pipeline across 4 hosts, with two chunks of layers per rank
    python -m vgpu.plan --model 70B --pp 4 --chunks 2 --tp 8 --batch 8 --recompute full

  every layout of 70B on 8 hosts, with at most 512 sequences per step: those that fit, fastest first
    python -m vgpu.plan --search --model 70B --hosts 8 --sequences 512

  sequences of 131,072 tokens, each split across 4 GPUs; matmuls in float8
    python -m vgpu.plan --model 8B --dp-shard 2 --cp 4 --sequence 131072 --float8 --recompute full

  Mixtral 8x7B on 64 GPUs, each with one expert per block
    python -m vgpu.plan --model 8x7B --dp-shard 64 --ep 8 --batch 2 --recompute full

  a model of your own: Llama 8B with different sizes
    python -m vgpu.plan --layers 24 --width 2048 --heads 16 --key-value-heads 16 \\
        --feed-forward 5504 --vocabulary 32000 --dp-shard 16 --gpu A100 --trace step.json

  serving 70B on four GPUs, in float8: how many users at once, and how fast
    python -m vgpu.plan --serve --model 70B --tp 4 --weight-bits 8 --cache-bits 8 --prompt 1000
"""

ADVICE = """\
To use less memory per GPU: a smaller --batch, --recompute full, --reshard-after-forward, leaving
out --sync-once, or more ranks (--dp-shard, --tp, --pp; --ep divides experts). --search lists all layouts, batches and
recomputation policies that fit."""

MODELS = LLAMA | MIXTRAL | DEEPSEEK
_SIZES = {
    "layers": "transformer blocks",
    "width": "width of the hidden states",
    "heads": "attention heads",
    "key_value_heads": "key and value heads",
    "feed_forward": "inner width of a block's feed-forward layer",
    "vocabulary": "number of tokens in the vocabulary",
}
_EXPERTS = {
    "experts": ("count", int, "experts per block, which replace its feed-forward layer"),
    "experts_per_token": ("per_token", int, "experts that each token goes through (default: 2)"),
    "expert_width": ("width", int, "inner width of an expert (default: the feed-forward layer's)"),
    "shared_width": (
        "shared_width",
        int,
        "inner width of a shared expert, which all tokens go through (default: 0, none)",
    ),
    "dense_layers": ("dense_layers", int, "leading blocks without experts (default: 0)"),
    "capacity": (
        "capacity",
        float,
        "slots per expert, relative to an equal share of the tokens (default: 1, as in dropless "
        "training with balanced experts)",
    ),
    "ranks_per_token": (
        "ranks_per_token",
        int,
        "maximum number of ep ranks that hold a token's experts; the token is sent once to each "
        "of them (default: no limit; it's sent once per expert)",
    ),
}
_LAYOUT = {
    "dp_replicate": "replicas: data parallelism with full copies of the model",
    "dp_shard": "ranks across which FSDP2 shards a replica's parameters",
    "tp": "neighboring ranks that split each layer: tensor parallelism",
    "pp": "pipeline ranks (each has --chunks stages); embedding and output each count as a layer",
    "ep": "neighboring dp-shard and context ranks that hold different experts: expert parallelism",
    "cp": "ranks that split each sequence: context parallelism",
}
_ALSO = {"cp": ["--context"]}
_COUNTS = {
    "batch": f"sequences per step on each data-parallel rank (default: {Plan.batch})",
    "sequence": "tokens per sequence (default: the model's; 8192 for Llama)",
    "gpus_per_host": f"GPUs per host (default: {Plan.gpus_per_host})",
    "chunks": "pipeline stages per rank: 1 for 1F1B, more for interleaved 1F1B "
    f"(default: {Plan.chunks})",
    "recompute_every": f"recompute one of every N blocks (default: {Plan.recompute_every})",
    "accumulate": "without a pipeline, batches per step whose gradients are accumulated "
    f"(default: {Plan.accumulate})",
    "micro_batches": "micro-batches per batch in a pipeline (default: the value of --pp)",
}
_SWITCHES = {
    "sync-once": "with --accumulate: reduce gradients only after the last batch; add "
    "--no-reshard-after-forward to gather parameters only for the first (ZeRO-1)",
    "wrap-ends": "wrap the embedding and the output separately in FSDP2, as notebooks/train.py does",
    "float8": "run the matmuls of the blocks' linear layers in float8, with one scale per tensor; "
    "experts stay in bfloat16",
    "compile": "fuse elementwise operations, as torch.compile does",
    "async-tp": "with --compile: overlap matmuls, piece by piece, with their collectives within a "
    "host (asynchronous tensor parallelism)",
}
_SEARCH = {
    "hosts": "number of hosts; replaces the layout options other than --cp and --ep",
    "sequences": "maximum number of sequences per step, across all GPUs",
}
_COSTS = {"arithmetic_share": "arithmetic_share", "compile": "fuses", "async_tp": "async_tp"}
"""The options for costs, with the names that ``predict`` uses for them."""
_SEARCHED = ("batch", "recompute", "reshard_after_forward", "trace")
"""Options that can't be combined with ``--search``."""
_SERVE = {
    "weight_bits": "bits per weight in the blocks; 8 means float8 (default: 16)",
    "cache_bits": "bits per element of the KV cache (default: 16)",
    "prompt": "tokens per prompt (default: 1024)",
    "output": "tokens per response (default: 256)",
}
_SERVED = {"model", *_SIZES, "tp", "pp", "gpu", "gpus_per_host", "network", "arithmetic_share"}
"""The other options that can be combined with ``--serve``."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m vgpu.plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # --gpus would mean --gpus-per-host
    )
    result.add_argument(
        "--model", choices=MODELS, help="Llama 3.1, Mixtral or DeepSeek (default: 8B)"
    )
    _add_counts(result, "sizes that override the model's", _SIZES)
    experts = result.add_argument_group("experts (each option overrides the model's)")
    for name, (_, kind, text) in _EXPERTS.items():
        metavar = "N" if kind is int else "X"
        experts.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    _add_counts(
        result, "layout (default: 1 each; the number of GPUs is the product of all but ep)", _LAYOUT
    )
    step = _add_counts(result, "step and cluster", _COUNTS)
    step.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        help="what the backward pass recomputes (activation checkpointing): none, selective "
        "(everything but attention and every second matmul), or full "
        f"(default: {Plan.recompute})",
    )
    step.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        help="whether to free gathered parameters after the forward pass and gather them again for "
        f"the backward pass (default: {Plan.reshard_after_forward})",
    )
    step.add_argument(
        "--reduce",
        choices=REDUCE,
        help=f"dtype in which gradients are reduced across ranks (default: {Plan.reduce})",
    )
    for name, text in _SWITCHES.items():
        step.add_argument(f"--{name}", action="store_true", help=text)
    step.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"GPU model: {', '.join(vgpu.PRESETS)} (default: {Plan.gpu}), or FILE.toml with "
        "fields of vgpu.GPUSpec; there, like = NAME takes missing fields from a preset",
    )
    step.add_argument(
        "--network",
        metavar="NAME",
        help=f"network between hosts: {', '.join(vgpu.NETWORKS)} (default: {Plan.network}), or "
        "FILE.toml, as for --gpu, with fields of vgpu.Network",
    )
    step.add_argument(
        "--arithmetic-share",
        type=float,
        metavar="X",
        help="fraction of the datasheet's FLOP/s that matmuls reach (default: "
        f"{vgpu.CostModel.arithmetic_share})",
    )
    step.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write the step's trace for ui.perfetto.dev"
    )
    search_group = _add_counts(
        result, "search all layouts, batch sizes and recomputation policies", _SEARCH
    )
    search_group.add_argument(
        "--search",
        action="store_true",
        help="print the fastest plans that fit; pipelines aren't tried",
    )
    serve_group = _add_counts(result, "plan a server for the model, not a training run", _SERVE)
    serve_group.add_argument(
        "--serve",
        action="store_true",
        help="print whether weights and KV cache fit on tp × pp GPUs, and how fast tokens are "
        "generated",
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
            _refuse(_SEARCH, given, "only used with --search")
            _refuse(_SERVE, given, "only used with --serve")
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
        print(f"\nThe step's trace is in {trace}: open it in https://ui.perfetto.dev.")
    if not step.fits:
        print(f"\n{ADVICE}")


def plan_of(given: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Return the plan that the options describe, and the costs for ``predict``."""
    own = {name: value for name, value in given.items() if name in _SIZES}
    sizes = dataclasses.replace(MODELS[given.get("model", "8B")], **own)
    sizes = dataclasses.replace(sizes, experts=_experts(sizes, given))
    layout = Layout(**{name: value for name, value in given.items() if name in _LAYOUT})
    costs = {_COSTS[name]: value for name, value in given.items() if name in _COSTS}
    if costs.get("async_tp") and not costs.get("fuses"):
        raise ValueError("--async-tp is a pass of torch.compile: also pass --compile")
    elsewhere = {"model", *_SIZES, *_EXPERTS, *_LAYOUT, *_COSTS}
    others = {name: value for name, value in given.items() if name not in elsewhere}
    return Plan(sizes, layout, **others), costs


def _experts(sizes: TransformerSizes, given: dict[str, Any]) -> ExpertSizes | None:
    """Return the model's experts, as changed by the options."""
    own = {_EXPERTS[name][0]: value for name, value in given.items() if name in _EXPERTS}
    if sizes.experts is not None:
        return dataclasses.replace(sizes.experts, **own)
    if not own:
        return None
    if "count" not in own:
        raise ValueError("the model has no experts: set their number with --experts")
    return ExpertSizes(**{"per_token": 2, "width": sizes.feed_forward} | own)


def _searched(given: dict[str, Any]) -> str:
    _refuse(_SEARCHED, given, "only used without --search")
    _refuse(["serve", *_SERVE], given, "not used with --search")
    hosts, sequences = given.pop("hosts", None), given.pop("sequences", None)
    if hosts is not None:
        _refuse(
            [name for name in _LAYOUT if name not in ("cp", "ep")],
            given,
            "can't be combined with --hosts",
        )
        each, cp = given.get("gpus_per_host", Plan.gpus_per_host), given.get("cp", 1)
        for name, count in (("--hosts", hosts), ("gpus_per_host", each), ("cp", cp)):
            check_count(name, count)
        if hosts * each % cp:
            raise ValueError(
                f"{hosts * each} GPUs can't be divided evenly into groups of cp = {cp} ranks"
            )
        given["dp_shard"] = hosts * each // cp
    plan, costs = plan_of(given)
    return f"{search(plan, sequences, **costs)}\n\nVirtual time, predicted by a cost model."


def _served(given: dict[str, Any]) -> str:
    known = _SERVED | _SERVE.keys()
    _refuse([name for name in given if name not in known], given, "not used with --serve")
    own = {name: value for name, value in given.items() if name in _SIZES}
    sizes = dataclasses.replace(MODELS[given.get("model", "8B")], **own)
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
    """Return a report on the plan: whether it fits, and where its bytes and seconds go."""
    plan = step.plan
    head = (
        f"{plan.layout} on {plan.layout.ranks} {plan.spec.name.removeprefix('Virtual ')}, "
        f"{plan.hosts} {'host' if plan.hosts == 1 else 'hosts'}"
    )
    where = "rank 0"
    if isinstance(step, PipelineStep):
        head += f"\n{_pipeline(plan)}"
        rank = step.timeline.ranks[step.stage]
        where = f"rank {rank}, the fullest, with {step.in_flight} micro-batches in flight"
    bytes_rows = [(cause, format_bytes(size)) for cause, size in step.bytes_by_cause.items()]
    bytes_rows += [
        ("allocated at the peak", format_bytes(step.allocated_bytes)),
        ("reserved by the allocator", format_bytes(step.reserved_bytes)),
        ("memory of a GPU", format_bytes(plan.spec.memory_bytes)),
    ]
    time_rows = [
        (cause, format_seconds(time_s), f"{time_s / step.seconds:.1%}")
        for cause, time_s in step.time_by_cause.items()
    ]
    verdict = "It fits." if step.fits else "It does not fit."
    return "\n\n".join(
        [
            head,
            str(Table((f"bytes on {where}", ""), bytes_rows)),
            verdict,
            str(Table((f"a step of {format_seconds(step.seconds)}", "", ""), time_rows)),
            f"{step.tokens_per_s:,.0f} tokens/s per GPU, {plan.tokens:,} tokens per step; model "
            f"FLOPs utilization {step.utilization:.1%}. Virtual time, predicted by a cost model.",
        ]
    )


def _pipeline(plan: Plan) -> str:
    """Describe the schedule, and how the layers are divided."""
    counts = [part.layers for part in split_layers(plan.sizes.layers, plan.layout.pp * plan.chunks)]
    runs = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    cut = ", ".join(f"{times} × {n}" if times > 1 else str(n) for n, times in runs)
    return (
        f"{plan.schedule.name}: {plan.schedule.micro_batches} micro-batches of size "
        f"{plan.micro_batch}; layers per stage: {cut}"
    )


if __name__ == "__main__":
    main()
