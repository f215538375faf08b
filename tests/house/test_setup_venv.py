"""The set-up script: it notices what is wrong with an environment and says it in one sentence."""

import ast
import subprocess
import sys

import pytest

import setup_venv
from teaching.lessons import ROOT


@pytest.fixture
def venv(tmp_path):
    """A real, empty environment, marked as ready."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "venv" / "ready.txt").write_text("stamp")
    return tmp_path / "venv"


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(setup_venv, "dependencies", lambda: [])


def test_a_ready_environment_has_no_problem(venv, no_packages):
    assert setup_venv.problem(str(venv), "stamp") == ""


def test_a_missing_one_is_noticed(tmp_path):
    assert setup_venv.problem(str(tmp_path / "none"), "stamp") == "missing"


def test_a_half_made_one_is_noticed(venv, no_packages):
    (venv / "ready.txt").unlink()
    assert setup_venv.problem(str(venv), "stamp") == "half-made"


def test_a_lost_interpreter_is_noticed(venv, no_packages):
    python = setup_venv.python_of(str(venv))
    subprocess.run(["rm", python], check=True)
    assert setup_venv.problem(str(venv), "stamp") == "broken"


def test_a_lost_package_is_noticed(venv):
    assert setup_venv.problem(str(venv), "stamp") == "broken"


def test_changed_packages_are_noticed(venv, no_packages):
    assert setup_venv.problem(str(venv), "another stamp") == "outdated"


def test_changed_settings_of_jupyterlab_are_noticed(monkeypatch):
    before = setup_venv.wanted_stamp()
    assert before == setup_venv.wanted_stamp()
    monkeypatch.setattr(setup_venv, "LAB_SETTINGS", {})
    assert setup_venv.wanted_stamp() != before


def test_the_packages_are_those_of_the_project_file():
    names = setup_venv.dependencies()
    assert {"torch", "torchvision", "jupyterlab", "nbmake", "matplotlib", "ipywidgets"} <= set(
        names
    )
    assert names[-1] == "multi-gpu-pytorch-hands-on"


def test_an_old_python_gets_one_sentence():
    with pytest.raises(setup_venv.SetupError, match=r"3\.11 or newer and this is 3\.9\.18"):
        setup_venv.require_python((3, 9, 18))
    setup_venv.require_python((3, 11, 0))


def test_an_old_python_can_read_the_script():
    source = (ROOT / "setup_venv.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 7))


def test_a_full_disk_gets_one_sentence():
    with pytest.raises(setup_venv.SetupError, match=r"1\.0 GB are free here and about \d GB"):
        setup_venv.require_disk(10**9, cpu=False)
    setup_venv.require_disk(10**11, cpu=False)


def test_a_failed_step_gets_one_sentence():
    with pytest.raises(setup_venv.SetupError, match="check the network"):
        setup_venv.run([sys.executable, "-c", "raise SystemExit(1)"], "check the network")
