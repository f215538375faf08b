"""`make lab` prints JupyterLab's address, and Ctrl+C leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

import open_lab
from teaching.lessons import ROOT


@pytest.mark.parametrize(
    ("environment", "sits_here"),
    [
        ({"DISPLAY": ":0"}, True),
        ({}, False),
        ({"SSH_CONNECTION": "203.0.113.5 50000 198.51.100.7 22", "DISPLAY": ":0"}, False),
        ({"CODESPACES": "true", "DISPLAY": ":0"}, False),
        ({"container": "podman", "DISPLAY": ":0"}, False),
    ],
)
def test_a_browser_opens_only_on_the_users_own_machine(monkeypatch, environment, sits_here):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert open_lab.sits_here() is sits_here


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def lab(tmp_path):
    """JupyterLab opened over SSH; yields its process and its output up to the lesson's address."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "USER": "me",
        "SSH_CONNECTION": "203.0.113.5 50000 198.51.100.7 22",
    }  # fmt: skip
    terminal, own = os.openpty()
    server = subprocess.Popen(
        [sys.executable, ROOT / "open_lab.py", "--port=0"], env=environment,
        stdin=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = [server.stdout.readline()]
    while lines[-1] and not re.match(r"\s+http://127\.0\.0\.1", lines[-1]):
        lines.append(server.stdout.readline())
    # JupyterLab prints its address just before it starts listening.
    port = int(re.search(r":(\d+)/lab", lines[-1])[1])
    while server.poll() is None and not listens(port):
        time.sleep(0.05)
    yield server, "".join(lines)
    server.kill()
    server.wait()
    os.close(terminal)
    os.close(own)
    server.stdout.close()


def test_ctrl_c_terminates_jupyterlab_and_its_kernels(lab, tmp_path):
    server, said = lab
    address = r"http://127\.0\.0\.1:(\d+)/lab/tree/00_start_here\.ipynb\?token=(\w+)\n$"
    port, token = re.search(address, said).groups()
    assert f"ssh -N -L {port}:127.0.0.1:{port} me@198.51.100.7" in said
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path, data=None):
        url = f"http://127.0.0.1:{port}/{path}"
        headers = {"Authorization": f"token {token}"}
        with opener.open(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return json.load(answer)

    ask("api/kernels", data=b"")
    kernels = psutil.Process(server.pid).children(recursive=True)
    assert kernels
    page = ask("lab/api/settings/@jupyterlab/notebook-extension:tracker")
    assert page["schema"]["properties"]["windowingMode"]["default"] == "none"
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    _, alive = psutil.wait_procs(kernels, timeout=60)
    assert not alive
    assert list(tmp_path.rglob("jpserver-*")) == []
