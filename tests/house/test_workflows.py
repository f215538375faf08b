"""The public CI runs commands that exist, on the systems that the project supports."""

import re

import pytest
import yaml

from teaching.lessons import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TESTS = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def commands(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".yml":
        return [text]
    jobs = yaml.safe_load(text)["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def commands_of(job):
    return [step["run"] for step in TESTS["jobs"][job]["steps"] if "run" in step]


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".ci" / "run"], ids=lambda path: path.stem)
def test_commands_name_existing_files_and_targets(path):
    for command in commands(path):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in TARGETS, f"no target {target}: {command}"
        for name in re.findall(r"\b(?:tests|docs|notebooks|helpers)(?:/[\w.]+)*", command):
            assert (ROOT / name).exists(), f"no {name}: {command}"
        for name in re.findall(r"(?:\w+/)*\w+\.py\b", command):
            assert (ROOT / name).exists(), f"no {name}: {command}"


def test_the_workflow_runs_make_test_all():
    assert "make test-all PYTHON=python" in commands_of("whole")


def test_the_lessons_run_on_three_operating_systems():
    systems = TESTS["jobs"]["lessons"]["strategy"]["matrix"]["system"]
    assert [name.split("-")[0] for name in systems] == ["ubuntu", "macos", "windows"]
    newest = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text("utf-8"))
    # YAML reads the word "on" as true.
    assert newest[True]["schedule"] and newest["jobs"]["test"]["uses"].endswith("/test.yml")
