"""Plans for training runs on clusters: counted bytes, rejected plans, and the command's output."""

import dataclasses
import json
import re

import pytest
import torch

import vgpu
from vgpu.plan import Layout, Plan, predict
from vgpu.plan import __main__ as command
from vgpu.plan.plan import MOST_RANKS
from vgpu.plan.transformer import LLAMA, LatentSizes, TransformerSizes

SMALL = TransformerSizes(2, 256, 8, 4, 512, 1024, sequence=128)
LATENT = dataclasses.replace(SMALL, key_value_heads=8, latent=LatentSizes(64, 32, 16))
OWN = (
    "--layers 2 --width 256 --heads 8 --key-value-heads 4 --feed-forward 512 --vocabulary 1024 "
    "--sequence 128 --gpus-per-host 4"
)
"""``SMALL`` on a command line."""


def run(options):
    command.main(f"{OWN} {options}".split())


def read(options):
    return command.plan_of(vars(command.parser().parse_args(f"{OWN} {options}".split())))


def test_a_ranks_persistent_bytes_match_the_estimate():
    step = predict(Plan(SMALL, Layout(dp_shard=4), sequence=128, gpus_per_host=4))
    whole = 4 * SMALL.parameters
    assert 0 < step.allocated_bytes <= step.reserved_bytes
    kept = step.bytes_by_cause  # in blocks of 512 bytes, plus the rotary position tables
    assert kept["parameters"] == pytest.approx(whole // 4 + 16_384, rel=1e-3)
    assert kept["optimizer state"] == pytest.approx(2 * whole // 4, rel=0.01)
    assert kept["gathered parameters"] > 0 < kept["gradients"]
    assert sum(step.time_by_cause.values()) == pytest.approx(step.seconds)
    assert step.tokens_per_s == pytest.approx(128 / step.seconds)


def test_a_gpu_does_not_reserve_memory_for_the_full_model():
    sizes = TransformerSizes(16, 512, 8, 4, 1024, 512, sequence=128)
    step = predict(Plan(sizes, Layout(dp_shard=32), sequence=128, recompute="full"))
    assert step.reserved_bytes < 4 * sizes.parameters


def test_each_kind_of_parallelism_issues_its_own_collectives():
    def sent(layout):
        step = predict(Plan(SMALL, layout, sequence=128, gpus_per_host=4))
        return {e.name for e in step.timeline.events if e.kind == "collective"}

    assert sent(Layout(dp_shard=8)) == {"all_gather", "reduce_scatter"}
    assert sent(Layout(dp_replicate=2, dp_shard=4)) == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    assert "all_gather" in sent(Layout(tp=4))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_takes_less_memory_and_more_time(how):
    plan = Plan(SMALL, Layout(dp_shard=4), 8, 128, gpus_per_host=4)
    plain, again = predict(plan), predict(dataclasses.replace(plan, recompute=how))
    assert again.allocated_bytes < plain.allocated_bytes
    assert again.timeline.flop > plain.timeline.flop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": Layout(dp_shard=6)}, "6 ranks .* don't fill hosts of 4 GPUs"),
        (
            {"layout": Layout(tp=8)},
            r"8 ranks can't share a layer evenly \(key-value heads: 4\); tp must divide 4",
        ),
        ({"recompute": "some"}, "one of none, selective, full, got 'some'"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"batch": 1.5}, "batch must be an integer of at least 1, got 1.5"),
        (
            {"sizes": dataclasses.replace(SMALL, layers=0)},
            "layers must be an integer of at least 1, got 0",
        ),
        (
            {"sizes": dataclasses.replace(SMALL, width=260)},
            "a width of 260 can't be divided into 8 heads",
        ),
        (
            {"sizes": dataclasses.replace(SMALL, key_value_heads=16)},
            "8 heads can't be divided evenly among 16 key",
        ),
        (
            {"sizes": dataclasses.replace(SMALL, latent=LatentSizes())},
            "needs as many key-value heads as heads",
        ),
        (
            {"sizes": dataclasses.replace(LATENT, latent=LatentSizes(rotary_width=7))},
            "rotary_width must be even",
        ),
        ({"sizes": LATENT, "layout": Layout(tp=2)}, "latent attention isn't supported with tensor"),
        ({"sizes": dataclasses.replace(LATENT, latent=True)}, "must be LatentSizes.* got True"),
        (
            {"sizes": dataclasses.replace(SMALL, rotary_base=float("nan"))},
            "rotary_base must be a finite number above 0, got nan",
        ),
        ({"gpu": "Z1"}, "no GPU preset 'Z1'"),
        ({"layout": Layout(dp_shard=100_000)}, "100,000 ranks .* at most 32,768"),
        ({"batch": 10**9}, "1,000,000,000 sequences of 128 tokens .* use a smaller batch"),
        ({"layout": Layout(pp=2), "batch": 10**9}, "500,000,000 sequences of 128 tokens"),
        ({"layout": Layout(4, 3)}, "differently"),
        ({"sizes": dataclasses.replace(SMALL, layers=10_000)}, "10,000 layers .* at most 1,024"),
        (
            {"layout": Layout(pp=2), "batch": 10_000, "micro_batches": 10_000},
            "10,000 micro-batches are too many: a plan can have at most 4,096",
        ),
    ],
)
def test_predict_rejects_an_impossible_plan(options, message):
    with pytest.raises(ValueError, match=message):
        predict(Plan(**{"sizes": SMALL, "layout": Layout(), "gpus_per_host": 4, **options}))


def test_the_sequence_length_defaults_to_the_models():
    assert Plan(SMALL, Layout()).sequence == 128
    assert read("--sequence 64")[0].sequence == 64


def test_a_plan_leaves_no_process_group_or_gpus_behind():
    predict(Plan(SMALL, Layout(dp_shard=4), sequence=128, gpus_per_host=4))
    assert not torch.distributed.is_initialized() and not vgpu.is_enabled()


def test_the_command_prints_bytes_time_and_speed_and_writes_a_trace(tmp_path, capsys):
    trace = tmp_path / "step.json"
    run(f"--dp-shard 8 --batch 2 --gpu A100 --trace {trace}")
    shown = capsys.readouterr().out
    assert "dp_shard 8 on 8 A100-SXM4-40GB, 2 hosts" in shown and "It fits." in shown
    assert re.search(r"reserved by the allocator +\S+ MiB", shown)
    assert re.search(r"[\d,]+ tokens/s per GPU, 2,048 tokens per step", shown)
    rows = json.loads(trace.read_text())["traceEvents"]
    assert any(row["name"].startswith("nccl") for row in rows)


def test_the_command_has_options_for_compiling_and_gathering_once():
    plan, costs = read("--dp-shard 4 --batch 8 --no-reshard-after-forward --compile")
    assert plan.sizes == dataclasses.replace(SMALL, sequence=LLAMA["8B"].sequence)
    assert costs == {"fuses": True} and not plan.reshard_after_forward
    fused, plain = predict(plan, **costs), predict(plan)
    kernels = [sum(e.kind == "kernel" for e in step.timeline.events) for step in (fused, plain)]
    assert kernels[0] < kernels[1]
    again = predict(dataclasses.replace(plan, reshard_after_forward=True))
    gathers = [sum(e.name == "all_gather" for e in s.timeline.events) for s in (plain, again)]
    assert gathers[0] < gathers[1]


def test_a_wrapped_embedding_and_output_are_gathered_separately():
    wrapped, _ = read("--dp-shard 4 --wrap-ends")
    gathered = [
        {e.size_bytes for e in predict(plan).timeline.events if e.name == "all_gather"}
        for plan in (wrapped, dataclasses.replace(wrapped, wrap_ends=False))
    ]
    one = 2 * SMALL.vocabulary * SMALL.width  # in bfloat16
    together = 2 * one + 2 * SMALL.width  # with the last norm
    assert one in gathered[0] - gathered[1] and together in gathered[1] - gathered[0]


def test_async_tp_is_an_option_of_a_plan(capsys):
    plan, costs = read("--tp 4 --batch 8 --compile --async-tp")
    assert costs == {"fuses": True, "async_tp": True}
    sent = {event.name for event in predict(plan, **costs).timeline.events}
    plain = predict(plan, fuses=True)
    assert "permute" in sent and "permute" not in {e.name for e in plain.timeline.events}
    # The loss's collectives remain, and so do those that reduce the sum of multiple matmuls.
    assert {"all_reduce", "reduce_scatter"} <= sent
    with pytest.raises(SystemExit):
        run("--tp 4 --async-tp")
    assert "--async-tp is a pass of torch.compile: also pass --compile" in capsys.readouterr().err


def test_matmuls_take_longer_if_gpus_differ_in_speed():
    plan = Plan(SMALL, Layout(dp_shard=8), batch=8, sequence=128)
    step = predict(plan, speed_spread=0.1)
    in_products_s = [
        sum(event.duration_s for event in each.timeline.events if event.flop)
        for each in (step.replayed(speed_spread=0), step)
    ]
    assert in_products_s[0] < in_products_s[1]


def test_a_replayed_step_equals_a_new_prediction():
    plan = Plan(SMALL, Layout(dp_shard=2, tp=2), 4, gpus_per_host=4)
    step = predict(plan, fuses=True)
    assert step.replayed().timeline == step.timeline
    costs = {"arithmetic_share": 0.2, "speed_spread": 0.1, "async_tp": True}
    again = step.replayed(**costs, gpu="A100", network="Ethernet 100")
    anew = predict(again.plan, fuses=True, **costs)
    assert again.seconds == pytest.approx(anew.seconds, rel=1e-9)
    assert again.seconds != step.seconds and again.reserved_bytes == step.reserved_bytes
    assert again.plan == dataclasses.replace(plan, gpu="A100", network="Ethernet 100")


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(pp=2)])
def test_predicting_with_another_gpu_and_network_changes_the_plan(layout):
    """Utilization is then relative to the other GPU."""
    plan = Plan(SMALL, layout, batch=2, sequence=128, gpus_per_host=2)
    on_other = predict(plan, gpu="A100", network="Ethernet 100", arithmetic_share=0.4)
    other = dataclasses.replace(plan, gpu="A100", network="Ethernet 100")
    assert on_other.plan == other
    expected = predict(other, arithmetic_share=0.4)
    assert on_other.utilization == expected.utilization
    assert on_other.timeline.makespan_s == expected.timeline.makespan_s


def test_the_command_advises_what_to_change_if_a_plan_does_not_fit(capsys):
    run("--dp-shard 4 --batch 20000 --gpus-per-host 2 --gpu A100")
    shown = capsys.readouterr().out
    assert "It does not fit." in shown and command.ADVICE in shown
    options = {option for action in command.parser()._actions for option in action.option_strings}
    assert set(re.findall(r"--[a-z-]+", command.ADVICE)) <= options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--width 260", "a width of 260 can't be divided into 8 heads"),
        ("--layers 0", "layers must be an integer of at least 1, got 0"),
        ("--dp-shard 0", "dp_shard must be an integer of at least 1, got 0"),
        ("--dp-shard 100000", f"too many: a plan can have at most {MOST_RANKS:,}"),
        ("--search --hosts 100000", f"too many: a plan can have at most {MOST_RANKS:,}"),
        ("--batch 1000000000", "use a smaller batch or shorter sequences"),
    ],
)
def test_the_command_rejects_impossible_plans_with_a_clear_message(capsys, options, message):
    with pytest.raises(SystemExit) as left:
        run(options)
    error = capsys.readouterr().err
    assert left.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_the_examples_in_the_help_parse(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    commands = re.findall(r"-m vgpu\.plan (--.*)$", shown.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 8 and max(map(len, shown.splitlines())) <= 100
    for options in commands:
        command.parser().parse_args(options.split())
