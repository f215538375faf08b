"""Virtual GPUs for tests that request them, a separate progress folder, the ledger's summary.

``pytest.mark.virtual_gpus(2, gpu="A100")`` takes the arguments of ``vgpu.enable``.
"""

import gc
import os
import sys
import tempfile

import pytest
import yaml
from broken_claims import all_broken
from rights import without_file_handles

from teaching import lessons

# Set before any kernel or worker starts, so that they inherit it.
_progress = tempfile.TemporaryDirectory(prefix="course-progress-")
os.environ["COURSE_PROGRESS_DIR"] = _progress.name


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request):
    """Fail a test that leaves something behind, rather than the next test."""
    before = _state()
    yield
    # Lesson 12 calls gc.freeze after its imports. In this process, that would permanently keep
    # reference cycles from earlier tests, and their bytes on virtual GPUs.
    gc.unfreeze()
    left = {name: value for name, value in _state().items() if value != before[name]}
    if left:
        _clear_up(before)
        pytest.fail(f"{request.node.nodeid} left behind {left}; before it: {before}")


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
def _virtual_gpus(request, _nothing_is_left_behind):
    marker = request.node.get_closest_marker("virtual_gpus")
    if marker is None:
        yield
        return
    import vgpu

    with vgpu.enable(*marker.args, **marker.kwargs):
        yield


# These start ranks, agents and kernels, each of which opens files.
_MANY_FILES = (
    "vgpu/launch",
    "helpers/test_train_script",
    "claims",
    "teaching",
    "vgpu/plan",
    "vgpu/collectives",
)


def pytest_collection_modifyitems(items):
    reason = without_file_handles()
    if not reason:
        return
    for item in items:
        if any(f"tests/{folder}" in item.path.as_posix() for folder in _MANY_FILES):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter):
    ledger = yaml.safe_load((lessons.ROOT / "notebooks" / "claims.yml").read_text("utf-8"))
    pending = [claim["id"] for claim in ledger if "pending" in claim]
    named = f": {', '.join(pending)}" if pending else ""
    tried = len({broken.claim for broken in all_broken()})
    terminalreporter.write_line(
        f"{len(ledger)} claims, {len(pending)} of them pending{named}; "
        f"{tried} have breaks that must make their cells fail"
    )
