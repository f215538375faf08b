"""notebooks/train.py: the same losses in every layout, checkpoints, messages.

Lesson 07 restarts it after a rank is killed, and compares the parameters bit for bit.
"""

import dataclasses
import itertools
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers import checkpoints, gpt, script
from teaching import lessons
from vgpu import launch
from vgpu.plan import Layout, Plan, predict
from vgpu.plan.transformer import LETTERS, LLAMA
from vgpu.profiling import counters

SCRIPT = str(lessons.ROOT / "notebooks" / "train.py")
LINE = re.compile(r"step (\d+): loss ([\d.]+), norm ([\d.]+)")


def on_a_rank(rank, world_size, arguments):
    dist.destroy_process_group()  # the script makes its own, as under torchrun
    sys.argv = [SCRIPT, *arguments]
    runpy.run_path(SCRIPT, run_name="__main__")


def at_the_third_loss(rank, world_size, arguments, what):
    """In the script, ``what`` receives the last rank's third loss and returns its replacement."""
    losses, cross_entropy = itertools.count(1), nn.functional.cross_entropy

    def instead(*given):
        loss = cross_entropy(*given)
        if not torch.is_grad_enabled():  # held out
            return loss
        return what(loss) if next(losses) == 3 and rank == world_size - 1 else loss

    with mock.patch.object(nn.functional, "cross_entropy", instead):
        on_a_rank(rank, world_size, arguments)


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the script on ``ranks`` ranks; return what it printed."""

    def run(options, ranks=1):
        if ranks > 1:
            launch.run(on_a_rank, ranks, options.split(), gpu="V100")
        else:
            monkeypatch.setattr(sys, "argv", [SCRIPT, *options.split()])
            try:
                runpy.run_path(SCRIPT, run_name="__main__")
            finally:  # a script that refuses to run exits
                if dist.is_initialized():
                    dist.destroy_process_group()
        return capfd.readouterr().out

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def losses(output):
    """(step, loss, norm of the gradients) of each line."""
    return torch.tensor([[float(x) for x in line] for line in LINE.findall(output)])


def parameters(folder, step):
    dcp_to_torch_save(folder / f"step-{step:08d}", folder / "plain.pt")
    return torch.load(folder / "plain.pt")["model"]


def test_the_script_has_at_most_250_lines():
    """The README and lesson 07 say so."""
    with open(SCRIPT, encoding="utf-8") as file:
        assert len(file.readlines()) <= 250


def test_layouts_match_a_single_processs_losses_and_norms(run):
    """Lessons 07, 12, 13 and 14 compare the losses of layouts that have one dimension."""
    alone = losses(run("--steps 20"))
    assert alone[-1, 1] < alone[0, 1] < 4.5
    assert torch.equal(losses(run("--steps 20 --recompute")), alone)
    layouts = {
        "--dp-shard 2 --tp 2 --recompute --accumulate 2": 2e-3,
        "--dp-replicate 2 --tp 2 --bf16 --compile": 3e-2,
    }
    for layout, within in layouts.items():
        found = losses(run(f"--steps 20 {layout}", 4))
        torch.testing.assert_close(
            found, alone, rtol=within, atol=0, msg=lambda text, layout=layout: f"{layout}: {text}"
        )


@pytest.mark.parametrize(("layout", "times"), [("--dp-replicate 2", 1), ("--dp-shard 2", 4)])
def test_replicas_add_gradients_once_per_step_and_shards_in_every_microbatch(
    run, capfd, layout, times
):
    """Otherwise each rank would hold the gradients of the whole model, in float32."""
    alone = losses(run("--steps 3"))
    options = f"--steps 3 --accumulate 4 {layout}".split()
    (_, calls), _ = launch.run(counters.count_collectives, 2, on_a_rank, options, gpu="V100")
    reduced = sum(count for name, count in calls if "reduce" in name)
    assert reduced == pytest.approx(3 * times * LETTERS.parameters, rel=0.01)
    torch.testing.assert_close(losses(capfd.readouterr().out), alone, rtol=2e-3, atol=0)


@pytest.mark.parametrize("layout", ["--dp-replicate 2", "--dp-shard 2 --tp 2"])
def test_gradients_that_are_not_finite_change_nothing_on_any_rank(tmp_path, capfd, layout):
    options = f"--steps 3 --save-every 1 --checkpoints {tmp_path} {layout}".split()
    ranks = 2 if "tp" not in layout else 4
    launch.run(at_the_third_loss, ranks, options, lambda loss: loss * torch.inf, gpu="V100")
    line = capfd.readouterr().out
    assert "step 3: loss inf, norm " in line, line
    assert "skipped updates: 1 (gradients not finite)" in line
    (before, moments), (after, moments_after) = (
        (parameters(tmp_path, step), torch.load(tmp_path / "plain.pt")["optimizer"]["state"])
        for step in (2, 3)
    )
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, state in moments.items():
        assert state["step"] == moments_after[name]["step"] == 2
        assert torch.equal(state["exp_avg"], moments_after[name]["exp_avg"])


def test_training_ends_when_no_gradient_is_finite(run, monkeypatch, capfd):
    cross_entropy = nn.functional.cross_entropy
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda *x: cross_entropy(*x) * torch.nan)
    with pytest.raises(SystemExit):
        run("--steps 20 --layers 1")
    output = capfd.readouterr()
    assert "step 10: loss nan" in output.out and "step 20" not in output.out
    assert output.err == "train.py: none of the last 10 gradients was finite\n"


def test_sigterm_to_one_rank_saves_the_step_and_terminates_all_ranks(run, tmp_path, capfd):
    options = f"--steps 20 --dp-shard 2 --checkpoints {tmp_path}"

    def terminated(loss):
        os.kill(os.getpid(), signal.SIGTERM)
        return loss

    with pytest.raises(launch.LaunchError):
        launch.run(at_the_third_loss, 2, options.split(), terminated, gpu="V100")
    shown = capfd.readouterr()
    assert [step for step, *_ in losses(shown.out)] == [3]
    assert "stopped by SIGTERM after step 3; the same command continues from there" in shown.err
    output = run(options, 2)
    assert f"resumed from {tmp_path / 'step-00000003'}" in output
    torch.testing.assert_close(losses(output), losses(run("--steps 20")), rtol=2e-3, atol=0)


def test_training_resumes_in_another_layout_from_the_last_complete_checkpoint(run, tmp_path):
    options = f"--steps 30 --save-every 10 --checkpoints {tmp_path}"
    whole = losses(run(f"{options} --dp-shard 4", 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    kept = [tmp_path / "step-00000010-best", tmp_path / "step-notes.txt"]
    kept[0].mkdir()
    kept[1].touch()
    for layout, ranks in (("--dp-shard 2 --tp 2", 4), ("", 1)):
        # As if killed while the last one was being written.
        (tmp_path / "step-00000030" / ".metadata").unlink()
        output = run(f"{options} {layout}", ranks)
        assert f"resumed from {tmp_path / 'step-00000020'}; dp_shard was 4, now " in output
        torch.testing.assert_close(
            losses(output),
            whole[-1:],
            rtol=2e-3,
            atol=0,
            msg=lambda text, layout=layout: f"{layout}: {text}",
        )
    assert all(path.exists() for path in kept)  # folders with other names aren't ours


def started(command):
    """Standard output of a command in which ``train.py`` is the script."""
    words = [SCRIPT if word == "train.py" else word for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_reports_speed_and_peak_with_cuda_read_as_vgpu():
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2"
    found = started(f"{torchrun} -m vgpu --cuda-is-vgpu --gpu H100 train.py --steps 10")
    assert re.search(r"step 10: .* tokens/s, \d+ MiB at the peak, MFU \d", found), found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "MFU 46.8%"),
        ("NVIDIA H100 PCIe", "MFU 61.3%"),
        ("NVIDIA H100 NVL", "MFU 55.5%"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MFU unknown: PEAK_TFLOPS in helpers/gpt.py lacks"),
        ("NVIDIA L40S", "MFU unknown: PEAK_TFLOPS in helpers/gpt.py lacks NVIDIA L40S"),
    ],
)
def test_mfu_uses_this_gpus_peak_or_is_unknown(monkeypatch, name, said):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    # Each of 8 ranks processes 8,000 tokens/s, at 57.9 GFLOP per token:
    # 6 · 7.5 billion, plus 12.9 GFLOP in attention.
    assert said in gpt.speed(8 * 8000, LLAMA["8B"], "cuda")


def test_a_cluster_runs_the_script_as_fast_as_the_plan_predicts():
    """Lesson 15 makes the same comparison for FSDP across hosts with tensor parallelism within one."""
    options = "--model 8B --layers 8 --bf16 --recompute"
    sizes = dataclasses.replace(LLAMA["8B"], layers=8)
    layouts = {
        "--cluster 1x8 {} --batch 8": Layout(dp_shard=8),
        "--cluster 2x8 {} --batch 2 --dp-replicate 2 --tp 8": Layout(dp_replicate=2, tp=8),
    }
    for line, layout in layouts.items():
        plan = Plan(sizes, layout, recompute="full", wrap_ends=True)
        found = started("vgpu --gpu H100 " + line.format("train.py " + options))
        assert script.printed_step_s(found) == pytest.approx(predict(plan).seconds, rel=0.02), line


def test_a_full_state_dict_is_loaded_into_shards(run, tmp_path):
    run(f"--steps 2 --checkpoints {tmp_path}")
    whole = parameters(tmp_path, 2)
    folder = tmp_path / "of 4"
    options = f"--steps 1 --learning-rate 0 --dp-shard 2 --tp 2 --weights {tmp_path / 'plain.pt'}"
    launch.run(on_a_rank, 4, [*options.split(), "--checkpoints", str(folder)], gpu="V100")
    found = parameters(folder, 1)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no checkpoint", "cannot read .*bad.pt: "),
        (
            {"norm.weight": torch.ones(3)},
            "bad.pt is from a different model: embedding.weight is missing there",
        ),
        (torch.ones(3), "bad.pt contains a Tensor, not a state dict"),
    ],
)
def test_the_script_rejects_a_file_that_has_none_of_its_weights(
    run, tmp_path, capfd, content, message
):
    bad = tmp_path / "bad.pt"
    if isinstance(content, bytes):
        bad.write_bytes(content)
    else:
        torch.save(content, bad)
    with pytest.raises(SystemExit):
        run(f"--steps 1 --weights {bad}")
    found = capfd.readouterr().err
    assert re.search(f"train.py: .*{message}", found) and "Traceback" not in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dp-shard 3", "dp_replicate 1 × dp_shard 3 × tp 1 != world size 1"),
        ("--tp 2", "dp_replicate 1 × dp_shard 1 × tp 2 != world size 1"),
        ("--batch 0", "--batch must be at least 1"),
        ("--save-every 0", "--save-every must be at least 1"),
        ("--dp-shard -2 --tp -2", "--dp-shard must be at least 0"),
        ("--layers -1", "--layers must be at least 0"),
        ("--learning-rate nan", "--learning-rate must be finite and at least 0, got nan"),
    ],
)
def test_the_script_rejects_sizes_that_are_not_divisible(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *options.split()])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert refused.value.code == 2
    assert capsys.readouterr().err == f"train.py: {message}\n"


def test_the_script_rejects_more_ranks_than_the_host_has_gpus(monkeypatch, capsys):
    """If it computed on the CPU instead, it would hang the hosts that use GPUs."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        gpt.join()
    assert (
        "train.py: this host has more ranks (2) than GPUs (1): start one rank per GPU"
        in capsys.readouterr().err
    )


def without_a_gpu(rank, world_size):
    if rank == 1:
        with mock.patch.object(torch.accelerator, "device_count", lambda: 0):
            on_a_rank(rank, world_size, ["--steps", "1"])
    on_a_rank(rank, world_size, ["--steps", "1"])


def test_the_script_rejects_a_mix_of_ranks_with_and_without_gpus(capfd):
    with pytest.raises(launch.LaunchError):
        launch.run(without_a_gpu, 2, gpu="V100")
    message = "either all ranks must have a GPU or none may; their devices are cpu, vgpu"
    assert message in capfd.readouterr().err


def test_the_script_rejects_restarts_that_could_hang(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(SystemExit):
        gpt.join()
    assert "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


GRAPHS = """
import runpy, sys, torch
compiled = torch.nn.Module.compile
torch.nn.Module.compile = lambda *args, **kwargs: compiled(*args, backend="eager", **kwargs)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def test_blocks_that_recompute_are_compiled():
    """torch.compile skips a module whose forward is checkpoint itself."""
    options = ["--steps", "1", "--layers", "1", "--batch", "2", "--compile", "--recompute"]
    command = [sys.executable, "-c", GRAPHS, SCRIPT, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.search(r"graphs: [1-9]", done.stdout), done.stderr


def test_the_script_rejects_another_models_checkpoint(run, tmp_path, capfd):
    run(f"--steps 2 --checkpoints {tmp_path}")
    with pytest.raises(SystemExit):
        run(f"--steps 4 --width 64 --checkpoints {tmp_path}")
    message = capfd.readouterr().err
    different = f"{tmp_path / 'step-00000002'} is from a different model: width was 128, now 64"
    assert message == f"train.py: {different}\n"


def test_the_script_rejects_a_folder_that_it_cannot_write_into_before_it_trains(
    run, tmp_path, capfd
):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        run(f"--steps 2 --checkpoints {tmp_path / 'file'}")
    found = capfd.readouterr()
    assert f"train.py: cannot write into {tmp_path / 'file'}: " in found.err
    assert "step" not in found.out


def on_its_own_disk(rank, world_size, folder):
    """Run the script; rank 1 doesn't find what rank 0 writes into the folder."""
    plain = open

    def instead(path, *mode):
        if rank == 1 and ".rank-0-" in str(path):
            raise FileNotFoundError(2, "No such file or directory")
        return plain(path, *mode)

    with mock.patch.object(checkpoints, "open", instead, create=True):
        on_a_rank(rank, world_size, ["--steps", "2", "--checkpoints", folder])


def test_the_script_rejects_a_folder_that_ranks_do_not_share(tmp_path, capfd):
    """Otherwise, each host would have only part of a checkpoint that counts as complete."""
    with pytest.raises(launch.LaunchError):
        launch.run(on_its_own_disk, 2, str(tmp_path), gpu="V100")
    found = capfd.readouterr()
    assert f"rank 1 cannot write to the file that rank 0 created in {tmp_path}: " in found.err
    assert "step" not in found.out and not list(tmp_path.iterdir())


def test_a_run_with_fewer_steps_than_its_checkpoint_ends_immediately(run, tmp_path):
    run(f"--steps 4 --layers 1 --checkpoints {tmp_path}")
    found = run(f"--steps 2 --layers 1 --checkpoints {tmp_path}")
    assert "resumed from" in found and not losses(found).numel()


def test_the_last_complete_checkpoint_survives_a_full_disk(run, tmp_path, capfd):
    run(f"--steps 2 --checkpoints {tmp_path}")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SystemExit):
            run(f"--steps 4 --checkpoints {tmp_path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = capfd.readouterr().err
    assert f"cannot write into {tmp_path}: rank 0 got" in message
    assert "the last complete checkpoint is kept" in message
    assert f"resumed from {tmp_path / 'step-00000002'}" in run(
        f"--steps 4 --checkpoints {tmp_path}"
    )
