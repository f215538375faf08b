"""JupyterLab as `make lab` opens it: what it says in each place, and what Ctrl+C leaves: nothing."""

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

DESKTOP = {"DISPLAY": ":0"}
CODESPACE = {"CODESPACES": "true", "CODESPACE_NAME": "fuzzy-disco-0"}
GITPOD = {"GITPOD_WORKSPACE_URL": "https://me-course-abc.ws-eu.gitpod.io"}
SSH = {"SSH_CONNECTION": "203.0.113.5 50000 198.51.100.7 2222", **DESKTOP}


@pytest.fixture
def on_a_desk(monkeypatch):
    """As on a machine of one's own that has a browser, whatever this one is."""
    monkeypatch.setattr(open_lab, "CONTAINER_FILES", ())
    monkeypatch.setattr(open_lab.webbrowser, "get", lambda: None)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (DESKTOP, ""),
        (SSH, "ssh session"),
        (CODESPACE, "another machine"),
        (GITPOD, "another machine"),
        ({"VSCODE_IPC_HOOK_CLI": "/tmp/x.sock", **DESKTOP}, "another machine"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/me/"}, "another JupyterLab"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", **DESKTOP}, "a container"),
        ({"container": "podman", **DESKTOP}, "a container"),
    ],
)
def test_a_browser_opens_only_in_front_of_whoever_asked(on_a_desk, environment, reason):
    found = open_lab.why_no_browser(environment)
    assert (reason in found) if reason else found == ""
    assert open_lab.settings(environment).ServerApp.open_browser is (reason == "")


def test_no_browser_opens_without_one_or_without_a_screen(on_a_desk, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert "DISPLAY is not set" in open_lab.why_no_browser({})

    def none():
        raise open_lab.webbrowser.Error

    monkeypatch.setattr(open_lab.webbrowser, "get", none)
    assert open_lab.why_no_browser(DESKTOP) == "there is none on this machine"


def test_the_tunnel_is_the_one_that_the_ssh_session_came_by(on_a_desk, monkeypatch):
    monkeypatch.setattr(open_lab.getpass, "getuser", lambda: "me")
    wanted = "ssh -p 2222 -N -L 8888:127.0.0.1:8888 me@198.51.100.7"
    assert open_lab.tunnel(SSH, 8888) == wanted
    assert open_lab.tunnel({}, 9999) == f"ssh -N -L 9999:127.0.0.1:9999 me@{socket.gethostname()}"
    assert any(wanted in line for line in open_lab.ways_in(SSH, 8888, local=True))


def test_a_container_is_told_how_to_publish_the_port():
    lines = "\n".join(open_lab.ways_in({"container": "docker"}, 8888, local=True))
    assert "docker run -p 127.0.0.1:8888:8888" in lines and "@THIS-MACHINE" in lines
    assert "docker run" not in "\n".join(open_lab.ways_in({"container": "docker"}, 8888, False))


@pytest.mark.parametrize(
    ("environment", "origin"),
    [
        (CODESPACE, "https://fuzzy-disco-0-8889.app.github.dev"),
        (GITPOD, "https://8889-me-course-abc.ws-eu.gitpod.io"),
    ],
)
def test_forwarded_ports_are_clicked_and_let_in(on_a_desk, environment, origin):
    assert open_lab.forwarded(environment, 8889) == origin
    allowed = open_lab.settings(environment).ServerApp.allow_origin_pat
    assert re.match(allowed, origin)
    assert not re.match(allowed, f"{origin}.example.org")
    assert "globe at port 8889 in the tab Ports" in "".join(
        open_lab.ways_in(environment, 8889, local=True)
    )
    assert "allow_origin_pat" not in open_lab.settings(DESKTOP).ServerApp


def test_it_says_that_a_port_is_taken_and_ctrl_c_leaves_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SSH_TTY": "/dev/pts/0"}
        server = subprocess.Popen(
            [sys.executable, ROOT / "open_lab.py", f"--ServerApp.port={port}"],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            lines = [server.stdout.readline()]
            while lines[-1] and not lines[-1].startswith("http"):
                lines.append(server.stdout.readline())
            said, address = "".join(lines[:-1]), lines[-1]
            listens = int(re.search(rf"port {port} is taken; .* port (\d+)", said).group(1))
            assert re.fullmatch(
                rf"http://127\.0\.0\.1:{listens}/lab/tree/00_start_here\.ipynb\?token=\w+\n",
                address,
            )
            assert "no browser is opened" in said and f"-L {listens}:127.0.0.1:{listens}" in said
            kernel = start_kernel(address)
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
            assert not psutil.pid_exists(kernel)
        finally:
            server.kill()
            server.stdout.close()


def start_kernel(address):
    """Start a kernel, as a notebook that is opened does; its process's number."""
    base, token = re.fullmatch(r"(.*)/lab/.*token=(\w+)\n", address).groups()
    request = urllib.request.Request(
        f"{base}/api/kernels", method="POST", headers={"Authorization": f"token {token}"}, data=b""
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        made = json.load(answer)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            if any(made["id"] in word for word in process.info["cmdline"] or []):
                return process.pid
        time.sleep(0.05)
    raise TimeoutError(f"kernel {made['id']} has no process")
