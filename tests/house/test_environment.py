"""The project's files agree with each other: packages, releases of PyTorch, commands, version."""

import re
import tomllib

import yaml

from teaching.lessons import ROOT
from vgpu import torch_releases

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TRIED = PYPROJECT["project"], PYPROJECT["tool"]["course"]["tried-torch"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def recipe(target):
    """Return the commands of a Makefile target."""
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found.splitlines()]


def test_every_file_names_the_tested_releases_of_pytorch():
    numbers = [[int(part) for part in release.split(".")] for release in TRIED]
    assert numbers == sorted(numbers)
    *older, newest = (release.rpartition(".")[0] for release in TRIED)
    oldest = f"torch>={older[0]}"
    assert oldest in PROJECT["dependencies"]  # the next test covers environment.yml
    assert f"PyTorch {', '.join(older)} and {newest}" in text("README.md")
    assert f"`{oldest}`" in text("docs/new_torch.md")
    assert tuple(numbers[0][:2]) == torch_releases.OLDEST
    assert tuple(numbers[-1][:2]) == torch_releases.NEWEST_TRIED
    jobs = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]
    matrix = jobs["linux"]["strategy"]["matrix"]["include"]
    assert [row["torch"] for row in matrix] == TRIED
    assert matrix[0]["python"] == PROJECT["requires-python"].removeprefix(">=")


def test_conda_and_pip_install_the_same_packages():
    (pip,) = (item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict))
    course = PROJECT["optional-dependencies"]["course"]
    assert pip == [*PROJECT["dependencies"], *course, "--editable ."]
    assert f"python{PROJECT['requires-python']}" in CONDA["dependencies"]


def test_ci_runs_the_readmes_test_command():
    assert "make test" in text(".ci/run").splitlines()
    assert "make test" in text("README.md") and "make lab" in text("README.md")


def test_the_pre_commit_hooks_run_the_commands_of_make_check():
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == recipe("check")


def test_the_changelog_and_the_citation_have_this_version():
    newest = re.search(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(text("CITATION.cff"))
    assert newest[1] == citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"] and citation["title"] in text("README.md")
