"""The public CI: it runs commands that there are, on the versions that the project promises."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from teaching.lessons import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TESTS = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def commands(path):
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_name_what_is_there(path):
    for command in commands(path):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in TARGETS, f"no target {target}: {command}"
        for name in re.findall(r"\b(?:tests|docs|notebooks|helpers)(?:/[\w.]+)*", command):
            assert (ROOT / name).exists(), f"no {name}: {command}"
        for name in re.findall(r"(?:\w+/)*\w+\.py\b", command):
            assert (ROOT / name).exists(), f"no {name}: {command}"


def test_what_make_test_samples_runs_whole():
    job = TESTS["jobs"]["whole"]
    assert job["env"] == {"TESTS": "whole"}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^`|]*(`tests/[^|]*) \|", text, re.M)
    suites = [name for row in rows for name in re.findall(r"`(tests/[\w./]+)`", row)]
    run = [name for step in job["steps"] for name in step.get("run", "").split()]
    missing = [
        suite for suite in suites if not any(suite == n or suite.startswith(f"{n}/") for n in run)
    ]
    assert len(rows) == 14 and not missing
    samplers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^from levels import ", path.read_text(encoding="utf-8"), re.M)
    }
    listed = {name for name in samplers if any(name.startswith(suite) for suite in suites)}
    assert samplers == listed


@pytest.mark.parametrize("job", ["linux", "lessons"])
def test_the_oldest_versions_that_are_promised_are_tried(job):
    (oldest,) = (
        each for each in TESTS["jobs"][job]["strategy"]["matrix"]["include"] if "torch" in each
    )
    (torch,) = (text for text in PROJECT["dependencies"] if text.startswith("torch>="))
    assert oldest["python"] == PROJECT["requires-python"].removeprefix(">=")
    assert oldest["torch"] == torch.removeprefix("torch>=")


def test_the_lessons_run_on_three_systems():
    systems = TESTS["jobs"]["lessons"]["strategy"]["matrix"]["system"]
    assert [name.split("-")[0] for name in systems] == ["ubuntu", "macos", "windows"]
    newest = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text("utf-8"))
    # YAML reads the word "on" as true.
    assert newest[True]["schedule"] and newest["jobs"]["test"]["uses"].endswith("/test.yml")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs the command bash")
@pytest.mark.parametrize(("system", "added"), [("Linux", "bin"), ("Windows", "Scripts, for all")])
def test_the_environment_s_folder_is_added_as_the_system_names_it(tmp_path, system, added):
    """Git's bash says /d/a/... to itself, which other programs on Windows do not know."""
    (command,) = (step["run"] for step in TESTS["jobs"]["lessons"]["steps"]
                  if "GITHUB_PATH" in step.get("run", ""))  # fmt: skip
    simulated = 'cygpath() { echo "$2, for all"; }\n' + command
    subprocess.run(["bash", "-e", "-c", simulated], cwd=tmp_path, check=True,
                   env={"RUNNER_OS": system, "GITHUB_PATH": "path"})  # fmt: skip
    assert (tmp_path / "path").read_text() == f"{tmp_path}/.venv/{added}\n"
