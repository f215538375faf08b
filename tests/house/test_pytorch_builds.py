"""Which builds of PyTorch are taken, and wheels that install without a network."""

import argparse
import http.server
import platform
import socket
import subprocess
import sys
import threading

import pytest

import pytorch_builds
import setup_venv


@pytest.fixture
def linux(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")


def never(*_):
    raise AssertionError("nobody should have asked")


@pytest.mark.parametrize(
    ("cpu", "cuda", "driver", "answers", "index", "said"),
    [
        (True, False, never, never, True, "as CPU=1 says"),
        (False, True, never, never, False, "as CUDA=1 says"),
        (False, False, lambda: True, never, False, "has an NVIDIA driver"),
        (False, False, lambda: False, lambda _: True, True, "no NVIDIA driver; CUDA=1"),
        (False, False, lambda: False, lambda _: False, False, "did not answer within 4 s; CPU=1"),
    ],
)
def test_on_linux_the_small_builds_where_they_are_enough(
    linux, cpu, cuda, driver, answers, index, said
):
    builds = pytorch_builds.choose(cpu, cuda, driver, answers)
    assert (builds.index == pytorch_builds.CPU_INDEX) is index and said in builds.why
    assert builds.download == ("0.5 GB" if index else "2.7 GB")


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_elsewhere_pypi_s_builds_are_the_small_ones(monkeypatch, system):
    monkeypatch.setattr(platform, "system", lambda: system)
    builds = pytorch_builds.choose(False, False, never, never)
    assert (builds.index, builds.download, builds.why) == (None, "0.5 GB", "")


def test_by_hand_is_one_of_the_two():
    command = [sys.executable, setup_venv.__file__, "--cpu", "--cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "not allowed with argument" in done.stderr


class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/good/torch/" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_an_index_is_within_reach_if_it_has_torch(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert pytorch_builds.is_within_reach(f"{address}/good")
        assert not pytorch_builds.is_within_reach(f"{address}/empty")
        server.shutdown()
    assert not pytorch_builds.is_within_reach(address)


def test_an_index_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(pytorch_builds, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not pytorch_builds.is_within_reach(f"http://127.0.0.1:{silent.getsockname()[1]}")


def options(**given):
    return argparse.Namespace(**{"cpu": False, "cuda": False, "wheels": None, **given})


def test_torch_comes_from_its_index_and_the_rest_as_ever(linux, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(setup_venv, "run", lambda command, _: commands.append(command))
    setup_venv.install("python", str(tmp_path), setup_venv.builds_for(options(cpu=True)))
    first, second = commands
    assert first[-4:] == [
        "--extra-index-url",
        pytorch_builds.CPU_INDEX,
        "torch>=2.11",
        "torchvision",
    ]
    assert second[-2:] == ["--editable", f"{setup_venv.ROOT}[course]"]
    assert pytorch_builds.CPU_INDEX not in second
    commands.clear()
    setup_venv.install("python", str(tmp_path), setup_venv.builds_for(options(cuda=True)))
    assert commands == [second]


def test_a_folder_of_wheels_is_for_one_kind_of_machine(tmp_path):
    with pytest.raises(setup_venv.SetupError, match="has no wheels of this course"):
        setup_venv.builds_for(options(wheels=str(tmp_path)))
    note = tmp_path / setup_venv.WHEELS_NOTE
    note.write_text("Plan9 mips, Python 3.11\n")
    with pytest.raises(setup_venv.SetupError, match=r"are for Plan9 mips, Python 3\.11, and"):
        setup_venv.builds_for(options(wheels=str(tmp_path)))
    note.write_text(pytorch_builds.machine_of(sys.executable) + "\n")
    assert setup_venv.builds_for(options(wheels=str(tmp_path))).index is None
