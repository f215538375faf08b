"""The README's first command, typed into a terminal: the address, lesson 00 in Chromium, Ctrl+C."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pexpect
import psutil
import pytest
from browser import clones

from teaching.lessons import ROOT

NOBODY = 65534
# Grant read access, since this checkout and its Python may be in a folder that only root can read.
AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.innerText)"
ERRORS = "[data-mime-type='application/vnd.jupyter.error']"


def first_command():
    """Return the first line of the README's first block of commands, as a user would copy it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"```\n(.*)\n", readme).group(1).split("#")[0].split()


@pytest.fixture
def clone(tmp_path):
    folder = clones.clone(tmp_path / "my clone")
    clones.lend_environment(folder)
    return folder


@pytest.fixture(params=["whoever runs this", "another user"])
def user(request, clone, tmp_path):
    """The prefix with which a user runs a command; the clone and the home folder are the user's."""
    (tmp_path / "home").mkdir()
    if request.param == "whoever runs this":
        return []
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root and the command setpriv")
    if subprocess.run([*AS_NOBODY, "true"], capture_output=True).returncode:
        pytest.skip("root can't give another user its read access on this machine")
    subprocess.run(["chown", "-R", str(NOBODY), tmp_path], check=True)
    return AS_NOBODY


def test_make_lab_opens_lesson_00_and_stops_on_ctrl_c(user, clone, tmp_path, browser):
    command = [*user, *first_command()]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "TERM": "xterm"}
    terminal = pexpect.spawn(
        command[0], command[1:], cwd=str(clone), env=environment, timeout=120, encoding="utf-8"
    )
    try:
        terminal.expect(r"(http://127\.0\.0\.1:\d+/\S+\?token=\w+)\r\n")
        run_lesson(browser, terminal.match.group(1))
        started = psutil.Process(terminal.pid).children(recursive=True)
        names = [" ".join(process.cmdline()) for process in started]
        assert any("open_lab" in name for name in names), names
        assert any("ipykernel" in name for name in names), names
        terminal.sendintr()
        terminal.expect(pexpect.EOF, timeout=60)
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive
    finally:
        terminal.close(force=True)
    assert list(Path(tmp_path, "home").rglob("jpserver-*")) == []


def run_lesson(browser, address):
    """Open the address and choose Run > Run All Cells; every code cell must run without an error."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    # Before there's a kernel, JupyterLab would ask which one to use.
    with page.expect_websocket(lambda socket: "/channels" in socket.url, timeout=120_000):
        page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=120_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    done = f"() => {PROMPTS}.every(text => /^\\[\\d+\\]:/.test(text))"
    page.wait_for_function(done, timeout=400_000, polling=100)
    assert len(page.evaluate(PROMPTS)) > 3
    assert page.locator(ERRORS).count() == 0
    page.close()
