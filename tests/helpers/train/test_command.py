"""The module that torchrun starts: equal to one process, exact to resume, clear when it refuses."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from dataclasses import fields

import programs
import psutil
import pytest
import torch
import torch.distributed as dist
from levels import sample
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers.data import DigitsCNN
from helpers.train import Settings, Training, agent
from helpers.train import __main__ as command_line
from vgpu import launch
from vgpu.launch import forkserver, launcher

TIME_S = 800  # for what takes seconds; a busy machine is slow to import torch
SHORT = Settings(epochs=2, width=4, batch_size=96)  # 14 steps an epoch


def trained(rank, world_size, settings, folder=None, save_at=None, stop_at=None):
    """On a rank: the parameters after each step of this run, and what it was resumed from."""
    torch.set_num_threads(1)  # a network this small only loses time with more
    training = Training(settings, folder)
    after_each_step = []
    for images, labels in training.batches():
        training.train_on(images, labels)
        after_each_step.append(vector(training))
        if training.step == save_at:
            training.save()
        if training.step == stop_at:
            break
    return after_each_step, training.resumed_from, training.history


def vector(training):
    return torch.nn.utils.parameters_to_vector(training.model.parameters()).detach().cpu()


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_process():
    [(steps, _, history)] = launch.run(trained, 1, SHORT)
    return steps, history


@pytest.mark.parametrize(("ranks", "gpu"), [(2, None), (3, None), (2, "V100")])
def test_every_step_equals_one_process_on_the_whole_batch(one_process, ranks, gpu):
    expected, history = one_process
    assert len(expected) == 28 and not torch.equal(expected[0], expected[-1])
    results = launch.run(trained, ranks, SHORT, gpu=gpu)
    for steps, _, _ in results:
        torch.testing.assert_close(steps, expected, rtol=1e-9, atol=1e-12)
    assert results[0][2] == pytest.approx(history)


@pytest.mark.parametrize("gpu", [None, "V100"], ids=["CPU", "virtual GPU"])
def test_resumed_in_the_middle_of_an_epoch_it_is_the_same_bits(tmp_path, gpu):
    # With dropout the random numbers of each rank count, too.
    settings = Settings(epochs=2, width=4, batch_size=96, dropout=0.5)
    # It saves after step 19 and goes on. That saving changes nothing the killed rank below shows.
    undisturbed = launch.run(trained, 2, settings, tmp_path, 19, gpu=gpu)
    assert not torch.equal(undisturbed[0][0][-1], undisturbed[0][0][-2])
    for (steps, found, history), (expected, _, whole) in zip(
        launch.run(trained, 2, settings, tmp_path, gpu=gpu), undisturbed, strict=True
    ):
        assert found == tmp_path / "step-00000019" and len(steps) == 28 - 19
        torch.testing.assert_close(steps, expected[19:], rtol=0, atol=0)
        # Rank 0 has noted the accuracies; the others read its notes with the checkpoint.
        assert not whole or history == whole


def test_resumed_on_another_number_of_ranks_it_is_equal(tmp_path, one_process):
    launch.run(trained, 3, SHORT, tmp_path, 19, 19)
    for steps, _, _ in launch.run(trained, 1, SHORT, tmp_path):
        torch.testing.assert_close(steps, one_process[0][19:], rtol=1e-9, atol=1e-12)


def test_a_sampler_begins_in_the_middle_of_its_epoch(alone):
    sampler = Training(SHORT, cpu=True).sampler
    sampler.set_epoch(3)
    whole = list(sampler)
    sampler.skip = 100
    assert list(sampler) == whole[100:] and len(sampler) == len(whole) - 100


def by_torchrun(options, capfd, monkeypatch):
    """The one-host command of the help; status, output, errors, and the processes it left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TRAIN_TEST", mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_S)
    return done.returncode, done.stdout, done.stderr, marked(mark)


def in_a_cell(options, capfd, monkeypatch):
    """The same, with torchrun's agent in this process, and ranks that are forked."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    forkserver.warm_up()
    before = psutil.Process().children(recursive=True)
    done = agent.torchrun(shlex.join(["torchrun", *options]))
    left = set(psutil.Process().children(recursive=True)) - set(before)
    assert not capfd.readouterr().err
    return done.status, done.output, done.errors, [*left]


STARTED = sample([in_a_cell, by_torchrun], 1)


def marked(mark):
    """The processes that have the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRAIN_TEST") == mark:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # not ours, or gone
    return found


def parameters(folder, to):
    """The parameters in the checkpoint of a folder, through a plain file of torch.save."""
    dcp_to_torch_save(max(folder.glob("step-*")), to)
    model = DigitsCNN(width=4).double()
    model.load_state_dict(torch.load(to)["model"])
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.skipif(os.name != "posix", reason="a signal is an exit status on POSIX systems")
def test_the_rank_that_is_to_be_lost_is_killed():
    options = ["--cpu", "--threads=1", "--epochs=1", "--width=4", "--batch-size=96", "--lose=0:3"]
    assert programs.run("helpers.train", *options).returncode == -signal.SIGKILL


@pytest.mark.parametrize("started", STARTED)
def test_a_killed_rank_is_restarted_and_the_end_is_the_same_bits(
    tmp_path, capfd, monkeypatch, started
):
    folder = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "helpers.train"]
    options += ["--epochs=2", "--width=4", "--batch-size=96", "--dropout=0.5", "--cpu"]
    options += ["--threads=1", "--save-every=5", f"--checkpoints={folder}", "--lose=1:18"]
    status, output, errors, left = started(options, capfd, monkeypatch)
    assert status == 0, output + errors
    # torchrun names what it takes for the first failure: rank 1, which was killed, or rank 0, which
    # had lost its peer and said so before it was ended. In a cell it may name rank 0's own error.
    failed = r"exitcode: -(9|15)\)" if started is by_torchrun else r"exitcode: (-9|-15|1)\)"
    assert re.search(failed, errors), "no rank was lost"
    shown = output.splitlines()
    assert shown[2:4] == [shown[0], f"resumed from {folder / 'step-00000015'}"]
    assert [line[:7] for line in shown if "epoch" in line] == ["epoch 1", "epoch 2"]
    assert shown[-1].startswith("done: ")
    assert left == []

    settings = Settings(epochs=2, width=4, batch_size=96, dropout=0.5)
    undisturbed = launch.run(trained, 2, settings)[0][0][-1]
    found = parameters(folder, tmp_path / "plain.pt")
    torch.testing.assert_close(found, undisturbed, rtol=0, atol=0)


def test_one_process_draws_a_progress_bar_where_somebody_looks(tmp_path):
    pty = pytest.importorskip("pty", reason="a terminal to look at needs a POSIX system")
    termios = pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    name, options = os.ttyname(theirs), ["--cpu", "--threads=1", "--epochs=1", "--batch-size=240"]
    with open(ours, "rb", buffering=0) as terminal:
        process = programs.start("helpers.train", *options, output=name, cwd=tmp_path)
        os.close(theirs)
        shown = b""
        try:
            while part := terminal.read(4096):
                shown += part
        except OSError as closed:
            # Linux says so where the last process that had the terminal has closed it.
            assert closed.errno == errno.EIO
    assert process.wait() == 0, shown
    text = shown.decode()
    assert re.search(r"1 rank: 100%\|.*5/5 .*loss=\d", text)
    assert re.search(r"epoch 1 of 1: \d+\.\d\d% of the held-out digits right", text)
    assert not list(tmp_path.iterdir()), "nothing is written unless asked for"


def test_the_help_names_every_setting_and_shows_commands_that_parse(capsys):
    with pytest.raises(SystemExit) as left:
        command_line.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for field in fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "(default: digits 0.07, gpt 0.01)" in shown and max(map(len, shown.splitlines())) <= 100
    commands = re.findall(r"^    .*-m helpers\.train(.*)$", shown, re.MULTILINE)
    assert len(commands) == 5
    for options in commands:
        command_line.parser().parse_args(options.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--epochs 0", "argument --epochs: expected a whole number from 1, found '0'"),
        ("--epochs two", "expected a whole number from 1, found 'two'"),
        ("--dropout 1", "argument --dropout: expected a number from 0 and below 1, found '1'"),
        ("--learning-rate nan", "expected a number above 0, found 'nan'"),
        ("--seed -1", "expected a whole number from 0, found '-1'"),
        ("--lose 3", "argument --lose: expected RANK:STEP, as in 1:150, found '3'"),
        ("--precision half", "invalid choice: 'half'"),
        ("--epoches 3", "unrecognized arguments: --epoches"),
        (f"--checkpoints {__file__}", "is a file"),
        ("--batch-size 1438", "a batch of 1438 is larger than the 1437 samples"),
        ("--save-every 5", "--save-every needs --checkpoints FOLDER"),
        ("--lose 1:5", "--lose names rank 1, and the ranks are 0 to 0"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(SystemExit) as left:
        command_line.main([*options.split(), "--cpu"])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        command_line.parser().parse_args(["--epochs", "0"])
    assert capsys.readouterr().err == "", "each rank said it"


def test_a_batch_that_cannot_be_split_names_those_that_can():
    message = "a batch of 32 cannot be split evenly among 3 ranks; use --batch-size 30 or 33"
    with pytest.raises(launch.RankRaised, match=message):
        launch.run(trained, 3, Settings())


def test_each_rank_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 12)
    assert [launcher.threads_per_rank(ranks) for ranks in (1, 2, 8, 12, 30)] == [12, 6, 1, 1, 1]
