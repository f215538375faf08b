"""The examples on the pages about virtual GPUs run and print what the pages show."""

from pathlib import Path

import pages
import programs
import pytest

from teaching.lessons import ROOT


@pytest.mark.parametrize("name", ["README.md", "docs/vgpu.md"])
def test_the_examples_run_and_print_what_the_page_shows(name):
    done = programs.run(Path(pages.__file__), ROOT / name)
    assert done.returncode == 0, done.stdout + done.stderr
