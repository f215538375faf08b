"""Shell commands, run by a real shell with this interpreter and a clean environment."""

import contextlib
import os
import subprocess
import sys

import psutil
import pytest

from helpers.shell import run_lines

SHOW = 'import os, sys; print(os.environ.get("CUDA_VISIBLE_DEVICES"), sys.prefix)'


def test_python_is_this_interpreter_and_cuda_visible_devices_is_initially_unset(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    plain, chosen = run_lines(
        ["python show.py", 'CUDA_VISIBLE_DEVICES="1,3" python show.py'], {"show.py": SHOW}
    )
    assert plain.output == f"None {sys.prefix}"
    assert chosen.output == f"1,3 {sys.prefix}"


def test_a_failing_line_returns_its_status_and_errors():
    (result,) = run_lines(["no_such_command 2,3"], {})
    assert result.status == 127
    assert "not found" in result.errors


def test_a_traceback_has_no_color_codes(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a kernel
    script = 'import os; print(os.environ.get("FORCE_COLOR")); 1 / 0'
    (result,) = run_lines(["python fails.py"], {"fails.py": script})
    assert result.output == "None"  # Python 3.12 and older would ignore the variable
    assert result.errors.endswith("\nZeroDivisionError: division by zero")
    assert "\x1b" not in result.errors


def test_a_line_that_never_ends_is_stopped():
    with pytest.raises(subprocess.TimeoutExpired):
        run_lines(["tail -f /dev/null; true"], {}, timeout_s=0.5)


def test_lines_share_one_time_limit():
    with pytest.raises(subprocess.TimeoutExpired, match=r"after 0\.4 seconds"):
        run_lines(["sleep 0.3", "sleep 0.6"], {}, timeout_s=0.4)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no process groups")
def test_processes_that_a_line_leaves_running_are_stopped():
    (left,) = run_lines(["sleep 60 > /dev/null 2>&1 & echo $!"], {})
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(left.output))
        assert process.status() == psutil.STATUS_ZOMBIE or process.wait(30) is None


def test_a_missing_shell_is_reported_with_a_clear_message(monkeypatch):
    monkeypatch.setattr("helpers.shell.shutil.which", lambda name, path=None: None)
    with pytest.raises(FileNotFoundError, match="no POSIX shell"):
        run_lines(["true"], {})
