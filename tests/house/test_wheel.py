"""The wheel contains only the library, and runs without the course."""

import os
import subprocess
import sys
import sysconfig
import zipfile

import pages
import pytest

from teaching.lessons import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "contents")
    return folder / "contents"


def test_the_wheel_contains_only_vgpu_with_its_types_and_the_pytest_plugin(wheel):
    packages = sorted(path.name for path in wheel.iterdir() if path.suffix != ".dist-info")
    assert packages == ["pytest_vgpu.py", "vgpu"]
    assert (wheel / "vgpu" / "for_children" / "sitecustomize.py").is_file()
    assert (wheel / "vgpu" / "py.typed").is_file()


def test_the_first_example_in_the_librarys_guide_runs_from_the_wheel(wheel, tmp_path):
    text = (ROOT / "docs" / "vgpu.md").read_text("utf-8")
    away = f"```python\nimport vgpu\nprint(vgpu.__path__ == [{str(wheel / 'vgpu')!r}])\n"
    away += "import importlib.util\nprint(importlib.util.find_spec('helpers'))\n```\n"
    page = tmp_path / "vgpu.md"
    page.write_text(
        f"{away}\n```text\nTrue\nNone\n```\n\n{text[: pages.BLOCK.search(text).end()]}", "utf-8"
    )
    # Without the module site, nothing adds this clone to sys.path.
    path = [wheel, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    wrong = pages.run(page, [sys.executable, "-S"], cwd=tmp_path, env=environment)
    assert not wrong, wrong
