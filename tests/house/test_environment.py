"""The project's files say the same as each other: environments, CI, pre-commit, version, README."""

import importlib.resources
import re
import tomllib

import yaml

from teaching.lessons import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def recipe(target):
    """The commands of a target of the Makefile."""
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found.splitlines()]


def test_conda_and_pip_install_the_same_packages():
    (pip,) = (item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict))
    course = PROJECT["optional-dependencies"]["course"]
    assert pip == [*PROJECT["dependencies"], *course, "--editable ."]


def test_conda_takes_a_python_that_the_package_allows():
    assert f"python{PROJECT['requires-python']}" in CONDA["dependencies"]


def test_ci_runs_the_readme_s_test_command():
    assert "make test" in text(".ci/run").splitlines()
    assert "make test" in text("README.md") and "make lab" in text("README.md")


def test_a_commit_is_checked_as_make_check_does():
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == recipe("check")


def test_the_newest_change_is_that_of_the_version():
    newest = re.search(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert newest[1] == PROJECT["version"]


def test_a_citation_is_of_this_version():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]
    assert citation["title"] in text("README.md")


def test_users_of_the_package_get_its_types():
    assert importlib.resources.files("helpers").joinpath("py.typed").is_file()
