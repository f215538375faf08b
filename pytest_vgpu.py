"""``pytest --vgpus 4``: run a project's CUDA tests on virtual GPUs, on a machine without a GPU.

Pytest imports this file for every project in the environment, so torch is imported only if needed.
"""

import ast
import fnmatch
import os
from collections.abc import Iterator

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

_IS_FIRST = pytest.StashKey[bool]()
_MARKER = (
    "vgpus(count, gpu='V100', memory_bytes=None): run the test with these virtual GPUs, created by "
    "vgpu.enable"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("virtual GPUs")
    group.addoption(
        "--vgpus", type=int, metavar="COUNT", help="run CUDA tests on this many virtual GPUs"
    )
    group.addoption("--vgpu-model", metavar="GPU", help="GPU model, such as H100 (default: V100)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start virtual GPUs before pytest imports any of the project's files."""
    options = early_config.known_args_namespace
    if options.vgpus is None:
        if options.vgpu_model is not None:
            raise pytest.UsageError("--vgpu-model needs --vgpus, the number of virtual GPUs")
        return
    from vgpu import cuda_is_vgpu
    from vgpu.run_program import ProgramSettings, is_first_process, start

    early_config.stash[_IS_FIRST] = is_first_process()
    gpu = "V100" if options.vgpu_model is None else options.vgpu_model
    try:
        start(ProgramSettings(options.vgpus, gpu, cuda_is_vgpu=True))
    except ValueError as error:
        raise pytest.UsageError(f"--vgpus and --vgpu-model: {error}") from None
    if options.assertmode == "rewrite":
        patterns = [*early_config.getini("python_files"), "conftest.py"]

        def explain_asserts(tree: ast.Module, source: bytes, filename: str) -> None:
            if any(fnmatch.fnmatch(os.path.basename(filename), pattern) for pattern in patterns):
                rewrite_asserts(tree, source, filename, early_config)

        cuda_is_vgpu.also_change = explain_asserts


@pytest.fixture(autouse=True)
def _vgpus_of_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("vgpus")
    if marker is None:
        yield
        return
    import vgpu

    with vgpu.enable(*marker.args, **marker.kwargs):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the virtual GPUs, and whether this process or one that it started used them."""
    config = terminalreporter.config
    if not config.stash.get(_IS_FIRST, False):
        return
    import torch

    from vgpu import run_program

    unused = run_program.end().unused(cuda_is_vgpu=True)
    names = torch.vgpu.get_device_name(0)
    terminalreporter.write_line(
        f"vgpu: {unused or f'ran on {torch.vgpu.device_count()} x {names}'}"
    )
