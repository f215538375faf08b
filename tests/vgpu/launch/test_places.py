"""A look at where a rank is: it names the line, and changes nothing for what runs there."""

import sys
import threading
import weakref

import pytest
import warm

from vgpu.launch import call_sites as places


@pytest.fixture
def often():
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Thing:
    pass


def left_behind():
    """What a function had in a variable, if that still lives when it has returned."""
    thing = Thing()
    return weakref.ref(thing)


def test_a_look_keeps_nothing_alive_that_the_rank_has_let_go_of(often):
    rank, done, late = threading.get_ident(), threading.Event(), 0
    seen = []

    def watch():
        for _ in range(20):
            seen.append(places.look(rank, "runs").place)
        done.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not done.is_set():
        late += left_behind()() is not None
    watcher.join()
    assert late == 0
    assert any(place is not None and place.filename == __file__ for place in seen)


THREADS_OF_C = """
import ctypes, threading
from vgpu.launch import places

c = ctypes.CDLL(None)
nothing = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
done = threading.Event()

def start():
    thread = ctypes.c_ulong()
    while not done.is_set():
        c.pthread_create(ctypes.byref(thread), None, nothing, None)
        c.pthread_join(thread, None)

starting = [threading.Thread(target=start) for _ in range(3)]
for each in starting:
    each.start()
for _ in range(60_000):
    places.look(threading.main_thread().ident, "runs")
done.set()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="starts threads as POSIX does")
def test_a_look_survives_threads_that_c_starts_meanwhile(tmp_path):
    """faulthandler, asked for all threads, reads what such a thread has not filled in yet."""
    script = tmp_path / "script.py"
    script.write_text(THREADS_OF_C)
    ran = warm.run_forked(script)
    assert ran.returncode == 0, ran.stderr


def test_a_look_finds_the_line_in_a_file_of_any_name(tmp_path):
    script = tmp_path / "größe 数.py"
    script.write_text("def wait(here, go):\n    here.set()\n    go.wait()  # this one\n", "utf-8")
    names = {}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), names)
    here, go = threading.Event(), threading.Event()
    rank = threading.Thread(target=names["wait"], args=(here, go))
    rank.start()
    here.wait()
    try:
        place = places.look(rank.ident, "runs").place
    finally:
        go.set()
        rank.join()
    assert place.filename == str(script)
    assert place.line in (2, 3)
