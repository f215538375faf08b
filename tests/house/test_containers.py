"""Containers, dev containers and Binder set the course up from the files that everyone uses."""

import json
import os
import re
import tomllib

import yaml

from teaching.lessons import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_containers_python_is_one_that_the_package_allows():
    bases = re.findall(r"^FROM python:(3\.\d+)-", text("Dockerfile"), re.MULTILINE)
    binder = yaml.safe_load(text("binder/environment.yml"))["dependencies"]
    bases += [text.removeprefix("python=") for text in binder if text.startswith("python=")]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert len(bases) == 2
    assert all(int(base.split(".")[1]) >= int(oldest.split(".")[1]) for base in bases)


def test_containers_set_up_and_open_with_the_readme_s_commands():
    dockerfile, dev = text("Dockerfile"), json.loads(text(".devcontainer/devcontainer.json"))
    assert re.search(r"^RUN make venv ", dockerfile, re.MULTILINE)
    assert json.loads(re.search(r"^CMD (.*)", dockerfile, re.MULTILINE).group(1))[:2] == [
        "make",
        "lab",
    ]
    assert f" AS {dev['build']['target']}\n" in dockerfile
    assert f"useradd --create-home --shell /bin/bash {dev['remoteUser']}" in dockerfile
    assert dev["updateContentCommand"].startswith("make venv")
    assert (ROOT / ".devcontainer" / dev["build"]["dockerfile"]).exists()


def test_binder_runs_the_setup_script():
    assert "python setup_venv.py --here --cpu" in text("binder/postBuild")
    assert os.name == "nt" or os.access(ROOT / "binder" / "postBuild", os.X_OK)
