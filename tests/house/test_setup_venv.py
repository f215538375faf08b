"""What setup decides: which PyTorch to install, from where, and what to do if pip fails."""

import argparse
import ast
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

import setup_venv
from teaching.lessons import ROOT


def options(**given):
    return argparse.Namespace(
        **{"cpu": False, "cuda": False, "wheels": None, "torch": None, **given}
    )


def test_a_python_that_is_too_old_can_parse_setup_venv():
    text = (ROOT / "setup_venv.py").read_text("utf-8")
    ast.parse(text, feature_version=(3, 6))
    assert text.index("sys.exit(") < text.index("import tomllib")


@pytest.mark.parametrize(
    ("release", "wanted"),
    [
        (None, "torch"),
        ("2.14.1", "torch==2.14.1"),
        ("2.14", "torch==2.14.*"),
        ("2.99.0", "torch==2.99.0"),
    ],
)
def test_pip_is_asked_for_the_requested_release(release, wanted):
    assert setup_venv.torch_requirement(release) == wanted


@pytest.mark.parametrize("release", ["2.11.0", "1.13", "newest"])
def test_an_unsupported_release_is_rejected_with_a_clear_message(release):
    with pytest.raises(SystemExit, match=rf"^setup: TORCH={release} isn't 2\.\d+ or newer"):
        setup_venv.torch_requirement(release)


@pytest.mark.parametrize(
    ("given", "driver", "answers", "small"),
    [
        ({"cpu": True}, True, False, True),
        ({"cuda": True}, False, True, False),
        ({}, True, True, False),
        ({}, False, True, True),
        ({}, False, False, False),
    ],
)
def test_linux_gets_the_small_builds_if_they_suffice(monkeypatch, given, driver, answers, small):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda name: name if driver else None)
    monkeypatch.setattr(setup_venv, "answers", lambda index: answers)
    assert (setup_venv.CPU_INDEX in setup_venv.source(options(**given))) is small


def test_pip_settings_that_choose_releases_are_dropped_but_mirrors_are_kept(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(
        "[global]\nconstraint = /caps.txt\nproxy = http://proxy.example:3128\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example")
    variables, left_out = setup_venv.without_choosing_settings(Path(sys.prefix))
    assert "constraint='/caps.txt'" in left_out and "find-links='/wheels'" in left_out
    assert variables["PIP_INDEX_URL"] == "https://mirror.example"
    assert variables["PIP_PROXY"] == "http://proxy.example:3128"
    assert variables["PIP_CONFIG_FILE"] == os.devnull and "PIP_FIND_LINKS" not in variables


def test_incompatible_builds_are_replaced_if_a_release_was_requested(tmp_path, monkeypatch):
    """For example, a folder of wheels has a CPU build of torch; torchvision is from an index."""
    calls, matches = [], iter([False, True])
    monkeypatch.setattr(
        setup_venv, "pip", lambda *arguments, **_: calls.append(arguments[1]) or True
    )
    monkeypatch.setattr(setup_venv, "builds_match", lambda venv: next(matches))
    monkeypatch.setattr(setup_venv, "without_choosing_settings", lambda venv: ({}, "find-links=x"))
    setup_venv.install(tmp_path, "torch==2.14.1", options(torch="2.14.1", cuda=True))
    assert calls == ["install", "uninstall", "install"]


def test_an_unavailable_release_is_reported_with_the_settings_that_may_be_in_the_way(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(setup_venv, "pip", lambda *arguments, **_: False)
    monkeypatch.setattr(setup_venv, "without_choosing_settings", lambda venv: ({}, "constraint=x"))
    with pytest.raises(SystemExit, match="installing failed"):
        setup_venv.install(tmp_path, "torch==2.15.9", options(torch="2.15.9", cuda=True))
    said = capsys.readouterr().out
    assert "without this machine's pip settings, constraint=x" in said
    assert "PyTorch 2.15.9 can't be installed, with or without these settings" in said


def test_a_failed_download_is_reported_with_a_clear_message(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_venv, "pip", lambda *arguments, **_: False)
    monkeypatch.setattr(setup_venv, "without_choosing_settings", lambda venv: ({}, ""))
    with pytest.raises(SystemExit, match=r"Check the network .* and the disk \(\d+ GB are free"):
        setup_venv.install(tmp_path, "torch", options(cuda=True))
