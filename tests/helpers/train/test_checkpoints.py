"""Checkpoints: whole or not there, and the folder tried by every rank first."""

import errno
import gc
import os
import shutil
import socket
import subprocess
import sys
import uuid

import programs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from helpers.train import CheckpointError, Settings, Training, checkpoints
from vgpu import launch

SHORT = Settings(epochs=2, width=4, batch_size=96)  # 14 steps an epoch


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


def test_a_damaged_checkpoint_is_named_with_what_to_do(alone, tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot use .*step-00000002: rank 0.* Delete it"):
        Training(SHORT, tmp_path, cpu=True)
    shutil.rmtree(tmp_path / "step-00000002")
    assert Training(SHORT, tmp_path, cpu=True).step == 1


def test_a_run_json_that_cannot_be_read_is_named(alone, tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "step-00000001" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the checkpoints"):
        Training(SHORT, tmp_path, cpu=True)


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


def test_hosts_that_do_not_share_the_folder_are_named_by_the_first_save(tmp_path):
    def begin(rank, world_size):
        Training(SHORT, tmp_path / str(rank), cpu=True).save()

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
        done = programs.run("helpers.train", "--cpu", f"--checkpoints={folder}")
        assert done.returncode == 2 and done.stdout == ""
        assert f"cannot write into {folder}: {why}" in done.stderr
        assert "name another folder with --checkpoints" in done.stderr


def test_a_rank_that_cannot_write_is_named_by_its_host(alone, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "part")

    monkeypatch.setattr(checkpoints.tempfile, "TemporaryFile", refuse)
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
