"""The set-up script: it notices what is wrong with an environment and says it in one sentence."""

import ast
import json
import os
import subprocess
import sys

import pytest

import setup_venv
from teaching.lessons import ROOT


@pytest.fixture
def venv(tmp_path):
    """A real environment without packages, marked as ready."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "venv" / "ready.txt").write_text("stamp")
    return tmp_path / "venv"


@pytest.fixture
def only_the_course(venv, monkeypatch):
    """The course is installed from its folder, as pip records it, and is all that is wanted."""
    monkeypatch.setattr(setup_venv, "dependencies", lambda: ["the-course"])
    record(venv, ROOT)


def record(venv, folder):
    (packages,) = venv.glob("[Ll]ib/**/site-packages")
    found = packages / "the_course-1.dist-info"
    found.mkdir(exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: the-course\nVersion: 1\n")
    (found / "direct_url.json").write_text(json.dumps({"url": folder.as_uri()}))


def test_a_ready_environment_has_no_problem(venv, only_the_course):
    assert setup_venv.problem(str(venv), "stamp") == ""


def test_a_missing_one_is_noticed(tmp_path):
    assert setup_venv.problem(str(tmp_path / "none"), "stamp") == "missing"


def test_a_half_made_one_is_noticed(venv, only_the_course):
    (venv / "ready.txt").write_text(setup_venv.UNFINISHED)
    assert setup_venv.problem(str(venv), "stamp") == "half-made"


def test_a_lost_interpreter_is_noticed(venv, only_the_course):
    python = setup_venv.python_of(str(venv))
    subprocess.run(["rm", python], check=True)
    assert setup_venv.problem(str(venv), "stamp") == "broken"


def test_one_that_was_moved_with_its_folder_is_noticed(venv, only_the_course, tmp_path):
    record(venv, tmp_path / "gone")
    assert setup_venv.problem(str(venv), "stamp") == "that of another folder"
    record(venv, tmp_path)
    assert setup_venv.problem(str(venv), "stamp") == "that of another folder"


def test_another_python_matters_if_one_was_named(venv, only_the_course):
    assert setup_venv.problem(str(venv), "stamp", sys.version_info[:2]) == ""
    found = setup_venv.problem(str(venv), "stamp", (3, 99))
    assert found == f"one of Python {sys.version_info[0]}.{sys.version_info[1]}"


def test_what_the_setup_did_not_make_stays(venv, tmp_path):
    (venv / "ready.txt").unlink()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, what in (
        ("venv", "a folder that this setup did not make"),
        ("file", "a file"),
        ("link", f"a link to {tmp_path / 'gone'}, which is not there"),
    ):
        with pytest.raises(setup_venv.SetupError, match="Rename or remove it") as caught:
            setup_venv.problem(str(tmp_path / name), "stamp")
        assert f"{tmp_path / name} is {what}, and it stays as it is" in str(caught.value)
    assert (venv / "pyvenv.cfg").exists() and (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_or_a_link_to_one_will_do(tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "venv").symlink_to(tmp_path / "large")
    assert setup_venv.problem(str(tmp_path / "large"), "stamp") == "missing"
    assert setup_venv.problem(str(tmp_path / "venv"), "stamp") == "missing"
    (tmp_path / "large" / "old").mkdir()
    (tmp_path / "large" / "ready.txt").write_text("Emptying that is interrupted leaves its mark.")
    setup_venv.empty(str(tmp_path / "venv"))
    assert (tmp_path / "venv").is_symlink()
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["ready.txt"]


def test_an_environment_is_made_behind_a_link(tmp_path, monkeypatch):
    (tmp_path / "large").mkdir()
    link = tmp_path / ".venv"
    link.symlink_to(tmp_path / "large")
    monkeypatch.setattr(setup_venv, "VENV", str(link))
    monkeypatch.setattr(setup_venv, "install", lambda *_: None)
    monkeypatch.setattr(  # pip would take three seconds
        setup_venv,
        "run",
        lambda command, sentence: subprocess.run([*command, "--without-pip"], check=True),
    )
    setup_venv.make("missing", setup_venv.Builds(None, *setup_venv.SMALL, why=""))
    assert link.is_symlink() and (tmp_path / "large" / "pyvenv.cfg").exists()
    assert os.path.exists(setup_venv.python_of(str(link)))


def test_a_link_to_the_environment_of_another_folder_stays(venv, only_the_course, tmp_path):
    record(venv, tmp_path)
    (tmp_path / "link").symlink_to(venv)
    with pytest.raises(setup_venv.SetupError, match="environment of another folder"):
        setup_venv.problem(str(tmp_path / "link"), "stamp")
    assert (venv / "pyvenv.cfg").exists()


def test_a_lost_package_is_noticed(venv):
    assert setup_venv.problem(str(venv), "stamp") == "broken"


def test_changed_packages_are_noticed(venv, only_the_course):
    assert setup_venv.problem(str(venv), "another stamp") == "outdated"


def test_a_package_that_is_newly_wanted_is_added(venv, only_the_course, monkeypatch):
    monkeypatch.setattr(setup_venv, "dependencies", lambda: ["a-new-package", "the-course"])
    assert setup_venv.problem(str(venv), "stamp of that change") == "outdated"
    assert setup_venv.problem(str(venv), "stamp") == "broken"


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


def test_extras_are_those_of_the_project_file():
    assert setup_venv.dependencies("browser") == ["playwright"]
    assert "sphinx" in setup_venv.dependencies("book")
    with pytest.raises(setup_venv.SetupError, match="no packages named games"):
        setup_venv.dependencies("games")


def test_an_old_python_gets_one_sentence():
    with pytest.raises(setup_venv.SetupError, match=r"3\.11 or newer and this is 3\.9\.18"):
        setup_venv.require_python((3, 9, 18))
    setup_venv.require_python((3, 11, 0))


def test_an_old_python_can_read_the_script():
    for name in ("setup_venv.py", "pytorch_builds.py"):
        ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 6))


def test_a_full_disk_gets_one_sentence():
    with pytest.raises(setup_venv.SetupError, match=r"1\.0 GB are free here and about \d+ GB"):
        setup_venv.require_disk(10**9, needed=10**10)
    setup_venv.require_disk(10**11, needed=10**10)


def test_a_failed_step_gets_one_sentence():
    with pytest.raises(setup_venv.SetupError, match="check the network"):
        setup_venv.run([sys.executable, "-c", "raise SystemExit(1)"], "check the network")


def test_a_step_does_not_see_what_would_lead_it_astray(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example")
    seen = tmp_path / "seen"
    setup_venv.run(["/bin/sh", "-c", f"env > '{seen}'"], "unused")
    names = [line.partition("=")[0] for line in seen.read_text().splitlines()]
    assert "PIP_INDEX_URL" in names and not {"PIP_TARGET", "PYTHONPATH"} & set(names)


def test_a_failed_download_names_the_proxy_without_its_password(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert setup_venv.why_failed().endswith("check the network, then run the same again")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy.example:3128")
    said = setup_venv.why_failed()
    assert "the proxy proxy.example:3128, which HTTPS_PROXY names" in said
    assert "secret" not in said


def test_a_folder_that_takes_no_files_gets_one_sentence(tmp_path):
    with pytest.raises(setup_venv.SetupError, match=r"cannot be written to \(No such file"):
        setup_venv.require_writable(str(tmp_path / "none"))
    if os.geteuid() != 0:  # Root may write everywhere.
        tmp_path.chmod(0o500)
        with pytest.raises(setup_venv.SetupError, match=r"cannot be written to \(Permission"):
            setup_venv.require_writable(str(tmp_path))


def test_a_second_set_up_waits_for_the_first(tmp_path):
    pytest.importorskip("fcntl", reason="this system has no lock of this kind")
    script = (
        "import setup_venv, sys\nwith setup_venv.alone():\n    print('in', flush=True)\n    {}\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", script.format("sys.stdin.readline()")],
        cwd=setup_venv.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stdout.readline() == "in\n"
    second = subprocess.Popen(
        [sys.executable, "-c", script.format("pass")],
        cwd=setup_venv.ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "another set-up of this folder is under way" in second.stdout.readline()
    first.communicate("go on\n")
    assert second.communicate()[0] == "in\n"
