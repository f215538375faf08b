"""Runs of cells share the steps that they begin with, and nothing else."""

import pytest

PASSED = ("", "")


def outcomes(player, *runs):
    player.begin(runs)
    return [player.outcome(run) for run in runs]


def step(source):
    return (source[:20], source)


def test_what_runs_begin_with_runs_once(player, tmp_path):
    noted = tmp_path / "noted"
    shared = step(f"with open({str(noted)!r}, 'a') as file: print('ran', file=file)")
    x = step("x = 1")
    runs = [(shared, x, step(f"assert x == {number}")) for number in (1, 2)]
    runs.append((shared, step("x = 3"), step("assert x == 3")))
    kinds = [error.partition(":")[0] for _, error in outcomes(player, *runs)]
    assert kinds == ["", "AssertionError", ""]
    assert noted.read_text() == "ran\n"


def test_a_step_that_fails_fails_for_all_that_begin_with_it(player):
    fails = step("unknown")
    found = outcomes(player, (fails, step("a = 1")), (fails, step("b = 1")))
    assert found == [("unknown", "NameError: name 'unknown' is not defined")] * 2


@pytest.mark.parametrize(
    ("changed", "asserted"),
    [
        ("y = 2", "assert 'y' not in globals()"),
        ("torch.add = None", "assert torch.add is not None"),
        ("(folder / 'kept').write_text('2')", "assert (folder / 'kept').read_text() == '1'"),
        ("(folder / 'new').touch()", "assert not (folder / 'new').exists()"),
        ("(folder / 'kept').unlink()", "assert (folder / 'kept').exists()"),
    ],
)
def test_a_run_leaves_nothing_for_the_next(player, changed, asserted):
    shared = step(
        "import pathlib, tempfile, torch\n"
        "folder = pathlib.Path(tempfile.mkdtemp()); (folder / 'kept').write_text('1')"
    )
    found = outcomes(player, (shared, step(changed)), (shared, step(asserted)), (step(""),))
    assert found == [PASSED] * 3


def test_what_leaves_a_thread_runs_for_each(player, tmp_path):
    noted = tmp_path / "noted"
    thread = step(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"with open({str(noted)!r}, 'a') as file: print('ran', file=file)"
    )
    alive = "assert threading.active_count() == 2"
    found = outcomes(player, *((thread, step(alive + "\n" * count)) for count in (0, 1)))
    assert found == [PASSED] * 2 and noted.read_text() == "ran\n" * 3


def test_backward_on_virtual_gpus_leaves_no_thread(player):
    shared = step(
        "import psutil, torch\nimport vgpu\nvgpu.enable(1)\n"
        "w = torch.ones(2, device='vgpu', requires_grad=True)\nw.sum().backward()\n"
        "assert psutil.Process().num_threads() == 1"
    )
    once_more = step("w.sum().backward(); assert w.grad.tolist() == [2, 2]")
    twice = step("(2 * w).sum().backward(); assert w.grad.tolist() == [3, 3]")
    assert outcomes(player, (shared, once_more), (shared, twice)) == [PASSED] * 2


def test_ranks_start_from_a_fork(player):
    shared = step("from vgpu import launch")
    runs = [
        (shared, step(f"assert launch.run(lambda rank, ranks: rank, {n}) == list(range({n}))"))
        for n in (1, 2)
    ]
    assert outcomes(player, *runs) == [PASSED] * 2


def test_a_process_that_ends_is_no_pass(player):
    shared = step("import os")
    found = outcomes(player, (shared, step("os._exit(3)")), (shared, step("a = 1")))
    assert found == [("process", "ended with status 3"), PASSED]
