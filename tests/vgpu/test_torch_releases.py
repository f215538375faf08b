"""Unsupported older torch releases, untested newer ones, and missing names."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch

import vgpu
from vgpu import torch_releases
from vgpu.torch_patches.undo import Changes

NEWER = "2.99.0"


def test_an_older_torch_is_rejected_with_a_clear_message():
    code = 'import torch; torch.__version__ = "2.12.1+cpu"; import vgpu'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: found torch 2.12.1+cpu, but virtual GPUs need 2.13 or newer: "
        'python -m pip install "torch>=2.13"'
    )
    # Checked before importing any part of the library that might fail on that torch.
    assert "backend.py" not in done.stderr


def test_this_torch_is_in_the_supported_range():
    torch_releases.check()
    assert torch_releases.was_tried()


def test_a_missing_name_is_an_error_on_a_tested_release(monkeypatch):
    monkeypatch.delattr(torch.nn.init, "_no_grad_trunc_normal_")
    with pytest.raises(AttributeError, match=r"has no torch\.nn\.init\._no_grad_trunc_normal_, "):
        vgpu.enable(2)
    assert not vgpu.is_enabled()


def test_a_newer_torch_warns_once_about_missing_names_and_the_rest_works(monkeypatch):
    monkeypatch.setattr(torch, "__version__", NEWER)
    monkeypatch.setattr(torch_releases, "_reported", set())
    monkeypatch.delattr(torch.nn.init, "_no_grad_trunc_normal_")
    monkeypatch.delattr(torch.nn.parallel.distributed, "_verify_param_shape_across_processes")
    with pytest.warns(RuntimeWarning) as told, vgpu.enable(2):
        assert torch.ones(2, device="vgpu:1").sum().item() == 2
    assert [str(one.message) for one in told] == [
        "torch 2.99.0 has no torch.nn.init._no_grad_trunc_normal_, "
        "torch.nn.parallel.distributed._verify_param_shape_across_processes: virtual GPUs were "
        "tested with torch 2.13 to 2.15, and continue without the features that need the missing "
        "names"
    ]
    with warnings.catch_warnings(action="error"), vgpu.enable(2):
        pass


def test_a_newer_torch_without_missing_names_does_not_warn(monkeypatch):
    monkeypatch.setattr(torch, "__version__", NEWER)
    with warnings.catch_warnings(action="error"), vgpu.enable(2):
        pass


def test_a_name_missing_from_a_module_causes_a_warning_on_its_import(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", NEWER)
    monkeypatch.setattr(torch_releases, "_reported", set())
    (tmp_path / "lacking.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with Changes() as changes:
        changes.when_imported("lacking", lambda module, c: c.wrap(module, "_setup", None))
        with pytest.warns(RuntimeWarning, match=r"torch 2\.99\.0 has no lacking\._setup: "):
            importlib.import_module("lacking")


def test_private_names_are_replaced_but_never_added():
    with Changes() as changes:
        changes.set(torch.nn, "_not_there", 1)
        changes.set(torch.nn, "not_there", 1)
        assert changes.missing == ["torch.nn._not_there"]
        assert not hasattr(torch.nn, "_not_there") and torch.nn.not_there == 1
