"""Virtual GPUs for tests that ask for them; hands off the user's progress; the ledger's state.

``pytest.mark.virtual_gpus(2, gpu="A100")`` takes the arguments of ``vgpu.enable``.
"""

import gc
import os
import sys
import tempfile
from contextlib import nullcontext

import ending
import pytest
import yaml
from broken_claims import all_broken
from rights import without_file_handles
from warm import kernels

from teaching import lessons

# Set before any kernel or worker starts: they inherit it.
_progress = tempfile.TemporaryDirectory(prefix="course-progress-")
os.environ["COURSE_PROGRESS_DIR"] = _progress.name
os.environ["JUPYTER_PATH"] = str(ending.JUPYTER)


@pytest.fixture(autouse=True)
def _as_it_was(request):
    """A test that leaves something behind fails, in place of the one after it."""
    before = _state()
    yield
    left = {name: value for name, value in _state().items() if value != before[name]}
    if left:
        _clear_up(before)
        pytest.fail(f"{request.node.nodeid} leaves behind: {left}; before it: {before}")


def _state():
    vgpu, pyplot = sys.modules.get("vgpu"), sys.modules.get("matplotlib.pyplot")
    return {
        "virtual GPUs enabled": bool(vgpu and vgpu.is_enabled()),
        "open figures": pyplot.get_fignums() if pyplot else [],
    }


def _clear_up(before):
    vgpu = sys.modules.get("vgpu")
    if vgpu and vgpu.is_enabled() and not before["virtual GPUs enabled"]:
        vgpu.disable()
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for number in set(pyplot.get_fignums()) - set(before["open figures"]):
            pyplot.close(number)


@pytest.fixture(autouse=True)
def _virtual_gpus(request, _as_it_was):
    marker = request.node.get_closest_marker("virtual_gpus")
    if marker is None:
        yield
        return
    import vgpu

    with vgpu.enable(*marker.args, **marker.kwargs):
        yield


# These start ranks, agents and kernels, each with files of its own.
_MANY_FILES = (
    "vgpu/launch",
    "helpers/train",
    "claims",
    "teaching",
    "vgpu/plan",
    "vgpu/collectives",
)


# Minutes each: a worker begins with these, so that both end at about the same time.
_LONGEST = (
    "tests/claims/test_broken_claims.py",
    "tests/helpers/checks/test_exercises.py",
    "tests/helpers/train/",
    "tests/conformance/",
    "tests/vgpu/launch/",
    "tests/teaching/",
    "notebooks/",
    "tests/vgpu/collectives/",
    "tests/vgpu/test_program.py",
    "tests/vgpu/plan/",
    "tests/house/",
    "tests/vgpu/",
)


def _place(item):
    path = item.nodeid.split("::")[0]
    return next((i for i, name in enumerate(_LONGEST) if path.startswith(name)), len(_LONGEST))


def pytest_collection_modifyitems(items):
    items.sort(key=_place)
    reason = without_file_handles()
    if not reason:
        return
    for item in items:
        if any(f"tests/{folder}/" in item.path.as_posix() for folder in _MANY_FILES):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection():
    # Importing torch's test suites makes a million objects, none of them garbage.
    gc.disable()


def pytest_collection_finish():
    gc.enable()
    _leave_out_what_lives()


_file = None


# Of the hooks for a test this one alone is called for lessons too: they do not lie in this folder.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    # What a file leaves, such as modules imported late, is gone through once and no more. Not at its
    # end: what its last test holds, such as an exception, would never be collected.
    global _file
    if item.path != _file:
        _file = item.path
        _leave_out_what_lives()
    with kernels.in_use() if item.path.suffix == ".ipynb" else nullcontext():
        return (yield)


def _leave_out_what_lives():
    # Torch and the tests themselves live to the end. Going through them would take a quarter of a
    # second in each collection of garbage, of which there are hundreds.
    while gc.collect():  # what one collection lets go may hold what only the next one finds
        pass
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    ledger = yaml.safe_load((lessons.ROOT / "notebooks" / "claims.yml").read_text("utf-8"))
    pending = [claim["id"] for claim in ledger if "pending" in claim]
    named = f": {', '.join(pending)}" if pending else ""
    tried = len({broken.claim for broken in all_broken()})
    terminalreporter.write_line(
        f"{len(ledger)} claims, {len(pending)} of them pending{named}; "
        f"for {tried} there are breaks with which their cells must fail"
    )
