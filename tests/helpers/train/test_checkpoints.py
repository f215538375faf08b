"""Checkpoints: whole or not there, damaged ones passed over and named, the folder tried out first."""

import errno
import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import warm

from helpers.train import CheckpointError, Settings, Training, checkpoints, folders
from vgpu import launch
from vgpu.launch import forkserver

SHORT = Settings(epochs=2, width=4, batch_size=96)  # 14 steps an epoch
FILES = ["run.json", ".metadata", "__0_0.distcp"]


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved(folder, *steps):
    """A training with a checkpoint at each of these steps; its parameters differ in each."""
    training = Training(SHORT, folder, cpu=True)
    for step in steps:
        training.step = step
        with torch.no_grad():
            next(training.model.parameters()).fill_(step)
        training.save()
    return training


def names(folder):
    return sorted(path.name for path in folder.glob("[!.]*"))


def flip(path):
    """Change 64 bytes, each at a place of its own."""
    content = bytearray(path.read_bytes())
    for place in random.Random(0).sample(range(len(content)), 64):
        content[place] ^= 0xFF
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, cut, empty, remove])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(alone, tmp_path, name, damage):
    saved(tmp_path, 3, 5)
    damage(tmp_path / "step-00000005" / name)
    resumed = Training(SHORT, tmp_path, cpu=True)
    assert resumed.step == 3 and resumed.resumed_from == tmp_path / "step-00000003"
    assert (next(resumed.model.parameters()) == 3).all()
    [message] = resumed.passed_over
    assert message.startswith(f"{tmp_path / 'step-00000005'} is damaged: ") and name in message
    # The next one takes its place, and the good one before it stays.
    resumed.step = 4
    resumed.save()
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_every_single_byte_of_run_json_counts(alone, tmp_path):
    path = saved(tmp_path, 3).folder / "step-00000003" / "run.json"
    whole = path.read_bytes()
    content = json.loads(whole)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert checkpoints._read(path) == {k: content[k] for k in ("made_with", "files")}
        except ValueError:
            continue
        # White space between the values is nothing that anybody reads.
        assert whole[place : place + 1].isspace()


def test_if_all_are_damaged_nothing_is_trained_and_all_are_named(alone, tmp_path):
    saved(tmp_path, 3, 5)
    for step, damage in ((3, flip), (5, remove)):
        damage(tmp_path / f"step-{step:08d}" / "__0_0.distcp")
    with pytest.raises(CheckpointError) as refused:
        Training(SHORT, tmp_path, cpu=True)
    first, second, advice = str(refused.value).splitlines()
    assert "step-00000005 is damaged: __0_0.distcp: No such file" in first
    assert "step-00000003 is damaged: __0_0.distcp has other bytes than were written" in second
    assert "Put back a copy, or delete these to begin anew" in advice
    assert names(tmp_path) == ["step-00000003", "step-00000005"], "the proof is gone"


def trained(rank, world_size, folder=None, save_at=(), stop_at=None):
    """On a rank: the parameters at the end of this run, and what was passed over."""
    torch.set_num_threads(1)
    training = Training(SHORT, folder, cpu=True)
    for images, labels in training.batches():
        training.train_on(images, labels)
        if training.step in save_at:
            training.save()
        if training.step == stop_at:
            break
    parameters = torch.nn.utils.parameters_to_vector(training.model.parameters()).detach()
    return parameters, training.resumed_from, training.passed_over


def test_two_ranks_notice_what_a_disk_did_to_either_part_and_end_at_the_same_bits(tmp_path):
    expected = [parameters for parameters, _, _ in launch.run(trained, 2)]
    launch.run(trained, 2, tmp_path, (9, 19), 22)
    flip(tmp_path / "step-00000019" / "__1_0.distcp")
    for rank, (found, resumed_from, damaged) in enumerate(launch.run(trained, 2, tmp_path)):
        assert resumed_from == tmp_path / "step-00000009"
        assert len(damaged) == 1 and "__1_0.distcp" in damaged[0]
        torch.testing.assert_close(found, expected[rank], rtol=0, atol=0)


def test_the_command_says_which_checkpoint_is_damaged_and_which_is_used(tmp_path):
    run = tmp_path / "run"
    options = ["--cpu", "--threads=1", "--width=4"]
    options += ["--batch-size=240", "--epochs=2", f"--checkpoints={run}"]
    warm.run_forked("helpers.train", *options).check_returncode()
    assert names(run) == ["step-00000005", "step-00000010"]
    flip(run / "step-00000010" / "__0_0.distcp")
    said = warm.run_forked("helpers.train", *options).stdout.splitlines()
    assert said[1].startswith(f"{run / 'step-00000010'} is damaged: __0_0.distcp has other bytes")
    assert said[1].endswith("The one before it is used")
    assert said[2] == f"resumed from {run / 'step-00000005'}"
    shutil.copy(run / "step-00000005" / "__0_0.distcp", run / "step-00000010")
    flip(run / "step-00000005" / "run.json")
    done = warm.run_forked("helpers.train", *options)
    assert done.returncode == 2 and "delete these to begin anew" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_of_other_settings_is_refused(alone, tmp_path):
    saved(tmp_path, 0)
    with pytest.raises(CheckpointError) as refused:
        Training(Settings(epochs=2, width=8, batch_size=96), tmp_path, cpu=True)
    assert str(refused.value) == (
        f"{tmp_path / 'step-00000000'} was made with --width 4, and this run has --width 8. "
        "Use the same, or another folder for --checkpoints."
    )


def test_the_last_two_whole_checkpoints_are_kept(alone, tmp_path):
    saved(tmp_path, 1, 2, 10)
    assert names(tmp_path) == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("cut_off_in", [(dcp, "save"), (os, "replace")])
def test_a_save_that_is_cut_off_leaves_the_one_before(alone, tmp_path, monkeypatch, cut_off_in):
    training = saved(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(*cut_off_in, cut_off)
        training.step = 5
        with pytest.raises(KeyboardInterrupt):
            training.save()
    assert (tmp_path / "unfinished").exists()
    resumed = Training(SHORT, tmp_path, cpu=True)
    assert resumed.resumed_from == tmp_path / "step-00000000" and resumed.step == 0
    resumed.step = 6
    resumed.save()
    assert names(tmp_path) == ["step-00000000", "step-00000006"]


def cut_off(*_, **__):
    raise KeyboardInterrupt


def test_hosts_that_do_not_share_the_folder_are_refused_before_they_train(tmp_path):
    def begin(rank, world_size):
        Training(SHORT, tmp_path / str(rank), cpu=True)

    with pytest.raises(launch.RankRaised, match=r"CheckpointError: .*All hosts must share"):
        launch.run(begin, 2)


def unwritable(tmp_path):
    """Folders that nobody can write into, root included."""
    (tmp_path / "file").write_text("")
    yield tmp_path / "file" / "run", "Not a directory"
    if sys.platform == "linux":
        yield "/proc/run", "No such file"
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        yield tmp_path / "locked", "Permission denied"


def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(tmp_path):
    for folder, why in unwritable(tmp_path):
        done = warm.run_forked("helpers.train", "--cpu", f"--checkpoints={folder}")
        assert done.returncode == 2 and done.stdout == ""
        assert f"cannot use {folder}: {why}" in done.stderr
        assert "name another folder with --checkpoints" in done.stderr


def test_a_rank_that_cannot_write_is_named_by_its_host(alone, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "part")

    monkeypatch.setattr(folders.Path, "write_text", refuse)
    with pytest.raises(CheckpointError) as refused:
        Training(SHORT, tmp_path, cpu=True)
    assert f"rank 0 on {socket.gethostname()} cannot write into {tmp_path}" in str(refused.value)
    assert "Read-only file system" in str(refused.value)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB; the checkpoint of a wide network has more."""
    disk = tmp_path / uuid.uuid4().hex
    disk.mkdir()
    mounted = sys.platform == "linux" and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root on Linux")
    yield disk
    # Lazily: what a failed test holds open must not keep the disk for every later run.
    subprocess.run(["umount", "--lazy", disk], check=True)


# The writer of torch that found no room says so once more at its end, from Python 3.13 on.
@pytest.mark.filterwarnings("ignore:.*NoCloseWriter:pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_reported_with_its_room_and_the_last_checkpoint_stays(alone, small_disk):
    training = Training(SHORT, small_disk, cpu=True)
    training.save()
    used = shutil.disk_usage(small_disk).used
    (small_disk / "ballast").write_bytes(
        bytes(max(0, shutil.disk_usage(small_disk).free - used // 2))
    )
    training.step = 1
    with pytest.raises(CheckpointError) as refused:
        training.save()
    message = str(refused.value)
    assert "step-00000001" in message and f"are free in {small_disk}" in message
    assert "Make room" in message
    assert Training(SHORT, small_disk, cpu=True).resumed_from == small_disk / "step-00000000"
    del refused
    gc.collect()


@contextmanager
def held(folder):
    """A process that trains in this folder and is killed at the end, as by a loss of power."""
    here, there = forkserver.context().Pipe()
    holder = forkserver.context().Process(target=hold, args=(folder, there))
    with forkserver.main_module_hidden():
        holder.start()
    assert here.recv() == "holds"
    try:
        yield holder
    finally:
        holder.kill()
        holder.join()


def hold(folder, pipe):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(Settings(), folder, cpu=True)
    pipe.send("holds")
    pipe.recv()
    assert training.folder == folder, "it is held to the end"


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has locks that end with their process")
def test_a_second_run_in_the_same_folder_is_refused_at_once(alone, tmp_path):
    with held(tmp_path) as first, pytest.raises(CheckpointError) as refused:
        Training(SHORT, tmp_path, cpu=True)
    assert str(refused.value) == (
        f"another run uses {tmp_path}: process {first.pid} on {socket.gethostname()}. Two runs "
        "would overwrite each other's checkpoints. Wait for it or end it, or name another folder "
        "with --checkpoints."
    )
    saved(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has locks that end with their process")
def test_a_lost_host_s_lock_is_waited_for(alone, tmp_path, monkeypatch):
    waited = []

    def come_free(seconds):
        waited.append(seconds)
        first.kill()
        first.join()

    with held(tmp_path) as first:
        (tmp_path / ".lock").write_text('{"host": "another", "process": 1}')
        monkeypatch.setattr(folders.time, "sleep", come_free)
        saved(tmp_path, 1)
    assert waited and names(tmp_path) == ["step-00000001"]


def test_two_trainings_of_one_process_share_its_folder(alone, tmp_path):
    first = saved(tmp_path, 1)
    second = Training(SHORT, tmp_path, cpu=True)
    assert second.step == 1 and first._hold is second._hold
