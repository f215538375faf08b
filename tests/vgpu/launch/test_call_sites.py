"""Where a rank is: its groups and the user's line, found without affecting what runs there."""

import sys
import sysconfig
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vgpu.launch import launcher
from vgpu.launch.hangs import is_library, rank_state, user_call_site

# Fedora keeps compiled packages in a separate folder, and Debian has its own folders.
LIBRARIES = [
    Path(sysconfig.get_path("stdlib"), "threading.py"),
    Path(sysconfig.get_path("platlib"), "numpy", "linalg.py"),
    Path("/usr/lib64/python3.13/site-packages/numpy/linalg.py"),
    Path("/usr/lib/python3/dist-packages/yaml/loader.py"),
    Path("/home/ada/.local/lib/python3.12/site-packages/einops/layers.py"),
    Path(torch.__file__).parent / "nn" / "parallel" / "distributed.py",
    Path(launcher.__file__),
]


@pytest.mark.parametrize("path", [*map(str, LIBRARIES), "<frozen importlib._bootstrap>"])
def test_files_that_belong_to_python_packages_or_vgpu_are_library_files(path):
    assert is_library(path)


def test_the_innermost_line_in_a_cell_takes_precedence_over_called_files():
    module, cell = __file__, "<cell 1>"
    assert user_call_site([(dist.__file__, 1), (module, 2), (cell, 3)]).filename == cell
    assert user_call_site([(dist.__file__, 1), (module, 2)]).line == 2
    assert user_call_site([(module, 2), ("<string>", 1)]).filename == module  # python -c
    assert user_call_site([(dist.__file__, 1), (launcher.__file__, 2)]) is None


@pytest.fixture
def often():
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Thing:
    pass


def left_behind():
    """Return a weak reference to a local object, which is dead unless the frame is kept alive."""
    thing = Thing()
    return weakref.ref(thing)


def is_in_this_file(site):
    return site is not None and site.filename == __file__


def test_reading_a_ranks_state_keeps_none_of_its_objects_alive(often):
    rank, done, late = threading.get_ident(), threading.Event(), 0
    seen = []

    def watch():
        # At first, the rank may still be starting the thread.
        while len(seen) < 20 or not (any(map(is_in_this_file, seen)) or len(seen) == 2000):
            seen.append(rank_state(rank, "runs").call_site)
        done.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not done.is_set():
        late += left_behind()() is not None
    watcher.join()
    assert late == 0
    assert any(map(is_in_this_file, seen))


def test_a_ranks_state_can_be_read_while_it_makes_and_destroys_groups(often):
    rank, done, read = threading.get_ident(), threading.Event(), []

    def watch():
        try:
            while len(read) < 2000 or not any(len(groups) > 1 for groups in read):
                read.append(rank_state(rank, "runs").members)
        finally:
            done.set()

    watcher = threading.Thread(target=watch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watcher.start()
    while not done.is_set():
        for group in [dist.new_group([0]) for _ in range(3)]:
            dist.destroy_process_group(group)
    watcher.join()
    dist.destroy_process_group()
    assert len(read) >= 2000
    assert all(ranks == [0] for groups in read for ranks in groups.values())


def test_the_call_site_is_found_whatever_the_files_name(tmp_path):
    script = tmp_path / "größe 数.py"
    script.write_text("def wait(here, go):\n    here.set()\n    go.wait()  # this one\n", "utf-8")
    names = {}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), names)
    here, go = threading.Event(), threading.Event()
    rank = threading.Thread(target=names["wait"], args=(here, go))
    rank.start()
    here.wait()
    try:
        site = rank_state(rank.ident, "runs").call_site
    finally:
        go.set()
        rank.join()
    assert site.filename == str(script)
    assert site.line in (2, 3)
