"""Checks for lesson 15: a run on paper, a layout, a checkpoint interval, a layout's defense."""

import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from helpers.checks.core import Wrong, exercise, expect_two, for_input, hint_by_value
from vgpu.plan import Layout, Plan, estimate, extrapolate
from vgpu.plan.recorded_step import ExtrapolatedStep
from vgpu.plan.transformer import LLAMA, TransformerSizes
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

ROOM = 0.85
"""The fraction of a GPU's memory that tensors may take: the allocator needs some of the rest."""


@exercise("15.1", "A training run on paper")
def back_of_envelope(answer: Callable[..., Any]) -> dict[str, Any]:
    for name in (*LLAMA, *LLAMA):
        sizes, given = LLAMA[name], {}
        given = {
            "parameters": sizes.parameters,
            "layers": sizes.layers,
            "width": sizes.width,
            "sequence": random.choice((4096, 8192, 32_768)),
            "tokens": random.randint(1, 20) * 10**12,
            "gpus": 2 ** random.randint(8, 14),
            "flop_per_s": random.choice((312e12, 989e12)),
            "mfu": random.choice((0.35, 0.4, 0.5)),
        }
        inputs = ", ".join(f"{key} {value:,}" for key, value in given.items())
        with for_input(inputs, "Return two numbers: days, and bytes per GPU."):
            yours = answer(**given)
            expect_two(yours, "two numbers: days, and bytes per GPU", "Return days, state_bytes.")
            expected = _estimate(given)
            hints = _estimate_hints(yours, given)
            _expect_near(yours[0], expected[0], 0.01, "days", hints[0])
            _expect_near(yours[1], expected[1], 0.01, "bytes per GPU", hints[1])
    return {
        "the last test case": f"Llama {name} on {given['tokens'] / 1e12:g} trillion tokens and "
        f"{given['gpus']:,} GPUs: {expected[0]:,.1f} days, {format_bytes(expected[1])} on each"
    }


def _estimate(given: dict[str, Any]) -> tuple[float, float]:
    flop = 6 * given["parameters"] + 12 * given["layers"] * given["width"] * given["sequence"]
    seconds = flop * given["tokens"] / (given["gpus"] * given["flop_per_s"] * given["mfu"])
    return seconds / 86_400, 16 * given["parameters"] / given["gpus"]


def _estimate_hints(yours: Any, given: dict[str, Any]) -> tuple[str, str]:
    days, state = _estimate(given)
    without, third, half = (
        _estimate({**given, "width": w * given["width"]}) for w in (0, 1 / 3, 0.5)
    )
    of_days = {
        "Attention is missing: 12 · layers · width · sequence FLOPs per token.": without[0],
        "That's only attention's forward pass: with backward, it's 12, not 4.": third[0],
        "That's half of attention: by convention, scores hidden by the causal mask count, too, "
        "so it's 12, not 6.": half[0],
        "That's only the forward pass: backward takes twice as much.": days / 3,
        "These are seconds; a day has 86,400.": days * 86_400,
        "These are hours; a day has 24.": days * 24,
        "No GPU reaches its peak: the model FLOPs utilization is missing.": days * given["mfu"],
        "That's one GPU's time, but all GPUs compute together.": days * given["gpus"],
    }
    of_state = {
        "Nothing is sharded here: divide by the number of GPUs.": state * given["gpus"],
        "Parameters are 4 of the 16 bytes: gradients and Adam's two moments are the rest.": state
        / 4,
        "Gradients are missing: 16 bytes per parameter, not 12.": state * 3 / 4,
        "That's mixed precision without the float32 copy: it's 16 bytes per parameter.": state / 2,
        "These are GB; return bytes.": state / 1e9,
        "These are GiB; return bytes.": state / 2**30,
    }
    otherwise = "It's FLOPs per token · tokens / (GPUs · peak · MFU), in days."
    hint_of_days = hint_by_value(yours[0], of_days, otherwise, within=0.005)
    otherwise = "It's 16 bytes per parameter, divided by the number of GPUs."
    return hint_of_days, hint_by_value(yours[1], of_state, otherwise, within=0.005)


def _expect_near(yours: float, expected: float, within: float, unit: str, hint: str) -> None:
    if not abs(yours / expected - 1) <= within:
        raise Wrong(
            yours=f"{yours:,.4g} {unit}",
            expected=f"{expected:,.4g} {unit}, within {within:.0%}",
            hint=hint,
        )


GPU_HOURS = 64 * 28 * 24
TARGET = 1.28
"""The required speed, relative to ``_as_on_256``."""


def _as_on_256() -> Plan:
    """Return the layout of the published training run on 256 GPUs, on a quarter of them."""
    return Plan(LLAMA["70B"], Layout(dp_shard=8, tp=8), batch=8, recompute="full")


@exercise("15.2", "A layout for 70B on 64 H100s", callable_answer=False)
def layout(answer: Plan) -> dict[str, Any]:
    if not isinstance(answer, Plan):
        raise Wrong(
            yours=f"{answer!r}",
            expected="a Plan for Llama 70B on 64 H100s",
            given="Llama 70B, 64 H100s",
            hint='Use Plan(LLAMA["70B"], Layout(dp_shard=..., tp=...), batch=...).',
        )
    given = f"{answer.layout}, batch {answer.batch}, recompute {answer.recompute!r}"
    with for_input(given):
        _same_task(answer, _as_on_256())
        _check_room(answer)
        target = TARGET * _step_of(_as_on_256()).tokens_per_s()
        step = _expect_speed(answer, target)
    saved = 1 - _step_of(_as_on_256()).tokens_per_s() / step.tokens_per_s()
    return {
        "tokens/s per GPU": f"{step.tokens_per_s():.0f}; required: {target:.0f}",
        "over four weeks": f"saves {saved * GPU_HOURS:,.0f} of the {GPU_HOURS:,} GPU-hours "
        f"that {_as_on_256().layout} takes",
        "allocated": f"{format_bytes(_allocated(step))} of "
        f"{format_bytes(ROOM * answer.spec.memory_bytes)}",
        "one step": f"{format_seconds(step.seconds())}: {_where(step)}",
    }


def _expect_speed(plan: Plan, least: float) -> ExtrapolatedStep:
    """Return the plan's step; raise ``Wrong`` below ``least`` tokens/s per GPU."""
    step = _step_of(plan)
    if step.tokens_per_s() < least:
        raise Wrong(
            yours=f"{step.tokens_per_s():,.0f} tokens/s per GPU ({_where(step)})",
            expected=f"at least {least:,.0f}",
            hint=_slow_hint(step),
        )
    return step


def _slow_hint(step: ExtrapolatedStep) -> str:
    waits = {n: s for n, s in step.time_by_cause.items() if n.startswith("waiting for")}
    waiting = sum(waits.values()) / step.seconds()
    if waiting > 0.15:
        return (
            f"The GPU spends {waiting:.0%} of the step waiting: use a smaller tp, or more tokens "
            "per GPU, to hide more of the communication."
        )
    if step.plan.layout.tp > 1 and waiting > 0.02:
        return (
            f"The GPU spends {waiting:.0%} of the step waiting, above all for tensor parallelism's "
            "collectives: do these layers have to be split?"
        )
    if step.plan.recompute == "full":
        return (
            "The GPU computes all the time. If there's memory left, more sequences spread the update "
            "and a step's beginning and end over more tokens; or recompute less."
        )
    return (
        "There's little recomputation and little waiting: use the remaining memory for more tokens."
    )


@exercise("15.3", "The checkpoint interval")
def best_interval(answer: Callable[..., Any]) -> dict[str, Any]:
    for _ in range(4):
        checkpoint_s = random.choice((60, 90, 120, 300))
        gpus, gpu_years = random.choice((4096, 8192, 16_384)), random.choice((5, 8, 12))
        given = f"checkpoint_s {checkpoint_s}, gpus {gpus:,}, gpu_years {gpu_years}"
        with for_input(given, "Return a number of seconds."):
            yours = float(answer(checkpoint_s, gpus, gpu_years))
        of_one_s = gpu_years * 365 * 86_400
        between_s = of_one_s / gpus
        best = estimate.best_interval_s(checkpoint_s, between_s)

        lasts = functools.partial(
            estimate.expected_goodput,
            checkpoint_s=checkpoint_s,
            restart_s=0,
            between_failures_s=between_s,
        )
        most = max(lasts(best * 2 ** (k / 20)) for k in range(-20, 21))
        if not yours > 0 or most - lasts(min(yours, 50 * between_s)) > 0.001:
            for_one_gpu_s = math.sqrt(2 * checkpoint_s * of_one_s)
            whole_lost_s = math.sqrt(checkpoint_s * between_s)
            wrong = {
                "That's for one GPU: with more GPUs, one of them fails sooner.": for_one_gpu_s,
                "Half an interval is lost, not a full one: a factor of 2 is missing.": whole_lost_s,
                "That's the time between failures, which should fit many checkpoints.": between_s,
                "The square root is missing.": 2 * checkpoint_s * between_s,
            }
            otherwise = "Too often: writing checkpoints costs more than failures do."
            if yours > best:
                otherwise = (
                    "Too rarely: repeating lost work costs more than writing checkpoints would."
                )
            share = f", {lasts(yours):.1%} goodput" if 0 < yours < 50 * between_s else ""
            raise Wrong(
                yours=f"every {yours:,.0f} s{share}",
                expected=f"at least {most - 0.001:.1%} goodput",
                given=given,
                hint=hint_by_value(yours, wrong, otherwise),
            )
    return {
        "the last test case": f"{given}: every {format_seconds(yours)}, {lasts(yours):.2%} goodput",
        "best possible goodput": f"{most:.2%}",
    }


class _Task(NamedTuple):
    sizes: TransformerSizes
    sequence: int
    gpus: int
    gpus_per_host: int
    gpu: str
    network: str

    def __str__(self) -> str:
        return (
            f"{self.sizes.parameters / 1e9:.1f} billion parameters, "
            f"sequence length {self.sequence}, {self.gpus} {self.gpu} "
            f"on hosts of {self.gpus_per_host}, {self.network}"
        )

    def plan(self, tp: int = 1, batch: int = 1) -> Plan:
        """Return a plan with ``tp`` and full recomputation, otherwise sharded over all GPUs."""
        return Plan(
            self.sizes,
            Layout(dp_shard=self.gpus // tp, tp=tp),
            batch,
            self.sequence,
            "full",
            gpu=self.gpu,
            gpus_per_host=self.gpus_per_host,
            network=self.network,
        )

    def best_tokens_per_s(self) -> float:
        """Return the tokens/s per GPU of the fastest of three recipes, among those that fit."""
        plans = (self.plan(), self.plan(batch=4), self.plan(tp=4))
        return max(_step_of(plan).tokens_per_s() for plan in plans if _fits(plan))


# Code Llama 34B, Llama 2 13B, and Llama 3 8B, on invented clusters. On the first, any recipe will
# do; the second needs more tokens per GPU; on the third, the long sequences fit only with tp.
_TASKS = (
    _Task(TransformerSizes(48, 8192, 64, 8, 22_016, 32_000), 4096, 48, 8, "H200", "RoCE 400"),
    _Task(TransformerSizes(40, 5120, 40, 40, 13_824, 32_000), 4096, 32, 4, "A100", "Ethernet 100"),
    _Task(
        TransformerSizes(32, 4096, 32, 8, 14_336, 128_256), 32_768, 32, 8, "A100", "InfiniBand HDR"
    ),
)
DEFENDED = 0.7
"""The fraction of the fastest recipe's speed that a layout must reach."""


@exercise("15.4", "Defend a layout")
def defend(answer: Callable[..., Any]) -> dict[str, Any]:
    shown = {}
    for task in _TASKS:
        given = str(task)
        with for_input(given, "Return plan, state_bytes, tokens_per_s: a Plan and two numbers."):
            plan, *numbers = answer(*task)
            state_bytes, tokens_per_s = map(float, numbers)
            if not isinstance(plan, Plan):
                raise Wrong(yours=f"{plan!r}", expected="a Plan", hint="The plan comes first.")
            _same_task(plan, task.plan())
        with for_input(f"{given}; {plan.layout}, batch {plan.batch}"):
            _check_room(plan)
            best = task.best_tokens_per_s()
            step = _expect_speed(plan, DEFENDED * best)
            state = 12 * task.sizes.parameters / plan.layout.dp_shard / plan.layout.tp
            speed = step.tokens_per_s()
            _expect_near(state_bytes, state, 0.05, "bytes of state", _state_hint(state_bytes, plan))
            hint = _speed_hint(tokens_per_s, step)
            _expect_near(tokens_per_s, speed, 0.25, "tokens/s per GPU", hint)
        shown[given] = (
            f"{plan.layout}, batch {plan.batch}: {format_bytes(_allocated(step))} allocated, "
            f"{tokens_per_s:,.0f} tokens/s per GPU expected, {speed:,.0f} in virtual time, "
            f"{speed / best:.0%} of the speed of the course's choice"
        )
    return shown


def _state_hint(mine: float, plan: Plan) -> str:
    count, parts = plan.sizes.parameters, plan.layout.dp_shard * plan.layout.tp
    if math.isclose(mine, 16 * count / parts, rel_tol=0.05):
        return "Gradients don't persist: parameters and Adam's state are 12 bytes, not 16."
    if math.isclose(mine, 12 * count, rel_tol=0.05):
        return "Divide by the number of GPUs that share one copy of the state."
    return "It's 12 bytes per parameter, divided by dp_shard times tp."


def _speed_hint(mine: float, step: ExtrapolatedStep) -> str:
    plan = step.plan
    at_peak = plan.spec.tensor_flop_per_s / estimate.flop_per_token(plan.sizes, plan.sequence)
    if math.isclose(mine, at_peak, rel_tol=0.1):
        return "That's for the full peak: arithmetic reaches half of it."
    if math.isclose(mine, at_peak / 2 * plan.layout.ranks, rel_tol=0.4):
        return "Return the tokens/s of one GPU, not of all."
    if plan.recompute == "full" and math.isclose(mine, at_peak / 2, rel_tol=0.05):
        return "Full recomputation runs forward twice: multiply the FLOPs by 5/4."
    return f"In virtual time, a step consists of: {_where(step)}."


def _same_task(plan: Plan, wanted: Plan) -> None:
    if plan.layout.pp > 1:
        raise Wrong(
            yours=f"a layout with {plan.layout.pp} pipeline stages",
            expected="dp_replicate × dp_shard × tp, without pipeline stages",
            hint="A pipeline may well work; predict(plan) can tell you. But this check records only "
            "a few layers, and stages don't divide those as they divide the full model.",
        )
    names = ("sizes", "sequence", "gpus_per_host", "network")
    wrong = [name for name in names if getattr(plan, name) != getattr(wanted, name)]
    if plan.spec != wanted.spec:
        wrong.append("gpu")
    if plan.layout.ranks != wanted.layout.ranks:
        wrong.append(f"the number of GPUs ({plan.layout.ranks})")
    if wrong:
        raise Wrong(
            yours=f"a plan that differs from the task in {', '.join(wrong)}",
            expected=f"{wanted.layout.ranks} {wanted.spec.name.removeprefix('Virtual ')}, and the "
            "given model, sequence length, hosts, and network",
            hint="dp_replicate × dp_shard × tp must equal the number of GPUs, and the plan must match "
            "the task.",
        )


def _fits(plan: Plan) -> bool:
    return _allocated(_step_of(plan)) <= ROOM * plan.spec.memory_bytes


def _check_room(plan: Plan) -> None:
    if not _fits(plan):
        by_cause = _step_of(plan).bytes_by_cause.items()
        causes = Table(("", ""), [(name, format_bytes(size)) for name, size in by_cause])
        raise Wrong(
            yours=f"{format_bytes(_allocated(_step_of(plan)))} allocated\n{causes}",
            expected=f"at most {format_bytes(ROOM * plan.spec.memory_bytes)}",
            hint="A larger dp_shard shrinks parameters, gradients, and optimizer state; fewer "
            "sequences, a larger tp, or more recomputation shrink the activations."
            if plan.reshard_after_forward
            else "With reshard_after_forward=False, gathered parameters stay until backward.",
        )


def _allocated(step: ExtrapolatedStep) -> float:
    return sum(step.bytes_by_cause.values())


def _where(step: ExtrapolatedStep) -> str:
    shares = {name: time_s / step.seconds() for name, time_s in step.time_by_cause.items()}
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share > 0.01)


@functools.cache
def _step_of(plan: Plan) -> ExtrapolatedStep:
    return extrapolate(plan)
