"""The wheel in a stranger's environment: only what it asks for, and a ``helpers`` that is theirs.

The environment holds the wheel, and of this one's packages those that the wheel's dependencies
lead to. Nothing is downloaded; .github/workflows/test.yml does the same from the package index.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pages
import pytest
from levels import ALL
from packaging.requirements import Requirement

from teaching.lessons import ROOT

pytest.importorskip("hatchling", reason="the wheel is built by hatchling, and it is not installed")

NAME = "multi_gpu_pytorch"
# Nothing of this process's may lead its modules there.
PLAIN = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment with the wheel, and with what the wheel depends on."""
    folder = tmp_path_factory.mktemp("stranger")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = ["install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    said = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
    site = Path(said.stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    wanted = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    for distribution in closure(wanted):
        for top in {file.parts[0] for file in distribution.files or ()}:
            place = site / top
            if top not in ("..", "__pycache__") and not place.exists():
                place.symlink_to(distribution.locate_file(top))
    return str(python)


def closure(wanted):
    """The distributions that requirements lead to in this environment."""
    found = {}
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        name = waiting.pop().name.lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            needs = [Requirement(text) for text in found[name].requires or ()]
            waiting += [
                need for need in needs if not need.marker or need.marker.evaluate({"extra": ""})
            ]
    return found.values()


def run(python, folder, *arguments):
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=PLAIN, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_one_package_with_a_name_of_its_own_and_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert {name.partition("/")[0] for name in files} == {NAME}
        assert f"{NAME}/py.typed" in files
        named = [name for name in files if re.search(rb"\bhelpers\b", archive.read(name))]
    assert not named
    assert not [name for name in files if f"{NAME}/checks" in name or f"{NAME}/widgets" in name]


def test_the_environment_has_nothing_of_the_notebooks(python, tmp_path):
    names = "matplotlib IPython ipywidgets sklearn torchvision yaml helpers pytest"
    script = f"import importlib.util as u\nprint([n for n in {names.split()} if u.find_spec(n)])"
    assert run(python, tmp_path, "-c", script) == "[]\n"


# Written as the page is, with the package's name in this repository.
EVERY_MODULE = """
```python
import importlib, pkgutil, helpers
left = ("plots", "__main__", "enabled")
names = [m.name for m in pkgutil.walk_packages(helpers.__path__, helpers.__name__ + ".",
                                               onerror=lambda name: None)]
names = [name for name in names if not set(left) & set(name.split("."))]
for name in names: importlib.import_module(name)
print(len(names) > 60)
```

```text
True
```
"""


def test_the_page_s_examples_run_and_then_every_module_can_be_imported(python, tmp_path):
    text = (ROOT / "docs" / "vgpu.md").read_text("utf-8")
    page = tmp_path / "vgpu.md"
    # The first one; under this package's own name tests/vgpu/test_pages.py runs them all.
    examples = text if ALL else text[: pages.BLOCK.search(text).end()]
    page.write_text(examples + EVERY_MODULE, "utf-8")
    wrong = pages.run(page, NAME, python, cwd=tmp_path, env=PLAIN)
    assert not wrong, wrong


def test_a_stranger_s_own_helpers_stay_theirs(python, tmp_path):
    (tmp_path / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "train.py").write_text(
        f"""import torch
import helpers
from {NAME} import launch

def total(rank, world_size):
    import torch.distributed as dist
    x = helpers.double(torch.ones(1, device=f"vgpu:{{rank}}"))
    dist.all_reduce(x)
    return x.item()

if __name__ == "__main__":
    print(launch.run(total, 2, gpu="V100"))
"""
    )
    assert run(python, tmp_path, "train.py") == "[4.0, 4.0]\n"
    (tmp_path / "one.py").write_text(
        "import torch, helpers\nprint(helpers.double(torch.ones(1, device='cuda:1')).device)\n"
    )
    command = ("-m", f"{NAME}.vgpu", "--cuda-is-vgpu", "one.py")
    assert run(python, tmp_path, *command).splitlines()[0] == "vgpu:1"


def test_a_type_checker_sees_its_types(python, tmp_path):
    (tmp_path / "use.py").write_text(
        f"from {NAME} import vgpu\n\nvgpu.enable(count=2)\nvgpu.enable(count='two')\n"
    )
    # torch's own types take a minute to read and are not the question.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,numpy.*,tqdm.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "--no-incremental", "use.py"],
        cwd=tmp_path, env=PLAIN, capture_output=True, text=True,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1 and "use.py:4" in errors[0] and "[arg-type]" in errors[0], done.stdout
