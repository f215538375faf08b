"""Opens JupyterLab at lesson 00, fitted to where it runs: as root, over ssh, without a browser.

``make lab ARGS="--port 9999"`` runs it; without make: ``.venv/bin/python open_lab.py --port 9999``.
What is given goes to JupyterLab, and wins over what is chosen here.
"""

import getpass
import os
import re
import signal
import socket
import sys
import urllib.parse
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path

from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from jupyterlab.labapp import LabApp
from traitlets.config import Config

LESSON = Path(__file__).resolve().parent / "notebooks" / "00_start_here.ipynb"
WILDCARDS = ("", "*", "0.0.0.0", "::")
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
KERNEL = "multi-gpu-pytorch"


def main(arguments: list[str]) -> None:
    config = settings(os.environ)
    server = LabApp.initialize_server([*arguments, str(LESSON)], config=config)
    # Its own list of addresses would follow ours; none of them opens the lesson.
    server.identity_provider.token_generated = False
    stop_on_signals(server)
    server.io_loop.add_callback(announce, server)
    server.start()


def stop_on_signals(server: ServerApp) -> None:
    """Let Ctrl+C, and a terminal that is closed, end the server and its kernels.

    Jupyter itself asks first, and where it cannot ask it leaves its kernels behind.
    """

    def stop(*_) -> None:
        # Pressed again, Ctrl+C waits for nothing; kernels notice that their server is gone.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        server.stop(from_signal=True)

    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), stop)


def settings(environment: Mapping[str, str]) -> Config:
    """JupyterLab's settings here, unless the command line or the user's own files say otherwise."""
    config = Config()
    config.ServerApp.ip = "127.0.0.1"
    # What Jupyter says at its start would bury the address.
    config.Application.log_level = "WARN"
    config.ServerApp.allow_root = is_root()
    config.ServerApp.open_browser = not why_no_browser(environment)
    if forwarded(environment, 0):
        # The requests carry the name of the forwarded address; the token stays the key.
        config.ServerApp.allow_remote_access = True
        pattern = re.escape(forwarded(environment, "PORT")).replace("PORT", r"\d+")
        config.ServerApp.allow_origin_pat = f"{pattern}$"
    return config


def is_root() -> bool:
    """Whether this process is root's; Windows has no root."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def in_container(environment: Mapping[str, str]) -> bool:
    """Whether this is a container, as Docker, Podman and Kubernetes mark theirs."""
    named = "container" in environment or "KUBERNETES_SERVICE_HOST" in environment
    return named or any(map(os.path.exists, CONTAINER_FILES))


def forwarded(environment: Mapping[str, str], port: int | str) -> str:
    """The address at which Codespaces or Gitpod shows a port of this machine; "" elsewhere."""
    if environment.get("CODESPACES") == "true":
        domain = environment.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN", "app.github.dev")
        return f"https://{environment['CODESPACE_NAME']}-{port}.{domain}"
    if "GITPOD_WORKSPACE_URL" in environment:
        host = urllib.parse.urlsplit(environment["GITPOD_WORKSPACE_URL"]).netloc
        return f"https://{port}-{host}"
    return ""


def why_no_browser(environment: Mapping[str, str]) -> str:
    """Why no browser can be opened for whoever sits in front of this, or "" if one can."""
    if forwarded(environment, 0) or "VSCODE_IPC_HOOK_CLI" in environment:
        return "this terminal's editor runs on another machine"
    if "JUPYTERHUB_SERVICE_PREFIX" in environment or "JUPYTER_SERVER_URL" in environment:
        return "this is a terminal of another JupyterLab"
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return "this is an ssh session"
    if in_container(environment):
        return "this is a container"
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys():
        return "this machine has no screen (DISPLAY is not set)"
    try:
        webbrowser.get()
    except webbrowser.Error:
        return "there is none on this machine"
    return ""


def announce(server: ServerApp) -> None:
    """Print what was chosen and, as the last line, the address to open."""
    for line in notes(server, os.environ):
        print("lab:", line)
    print(address(server, forwarded(os.environ, server.port)), flush=True)


def address(server: ServerApp, origin: str) -> str:
    """What to open in a browser; ``origin`` is where the server is seen, "" for this machine."""
    if not origin:
        host = "127.0.0.1" if server.ip in WILDCARDS else server.ip
        host = f"[{host}]" if ":" in host else host
        origin = f"{'https' if server.certfile else 'http'}://{host}:{server.port}"
    path = url_path_join(server.base_url, "lab")
    if server.file_to_run:
        lesson = os.path.relpath(server.file_to_run, server.root_dir)
        path = url_path_join(path, "tree", urllib.parse.quote(Path(lesson).as_posix()))
    token = server.identity_provider.token
    return f"{origin}{path}" + (f"?token={urllib.parse.quote(token)}" if token else "")


def notes(server: ServerApp, environment: Mapping[str, str]) -> Iterator[str]:
    """What to know before opening the address, a line for each thing."""
    port, local = server.port, server.ip not in WILDCARDS
    if is_root():
        reach = "this machine only" if local else "all addresses of this machine"
        yield f"you are root, so --allow-root is added; the server listens on {reach}"
    wanted = server.config.ServerApp.get("port", server.trait_defaults("port"))
    if wanted and wanted != port:
        yield f"port {wanted} is taken; JupyterLab listens on port {port}"
    if server.open_browser:
        yield "a browser opens; if none does, open the address below"
    else:
        yield from ways_in(environment, port, local)
    yield "Ctrl+C ends JupyterLab and all kernels; the address to open:"


def ways_in(environment: Mapping[str, str], port: int, local: bool) -> Iterator[str]:
    """How a browser gets to the server from where its user sits."""
    reason = why_no_browser(environment)
    yield "no browser is opened" + (f": {reason}" if reason else "")
    if forwarded(environment, port):
        yield f"click the address, or the globe at port {port} in the tab Ports"
    elif "VSCODE_IPC_HOOK_CLI" in environment:
        yield f"Ctrl+click the address (Cmd on a Mac), or port {port} in the tab Ports"
    elif "another JupyterLab" in reason:
        yield (
            f"to use the JupyterLab you are in: {sys.executable} -m ipykernel install --user "
            f"--name {KERNEL}, then open notebooks/{LESSON.name} with the kernel {KERNEL}"
        )
    else:
        if local and in_container(environment):
            yield (
                f"from outside a container: docker run -p 127.0.0.1:{port}:{port}, and in it "
                'make lab ARGS="--ip=0.0.0.0"'
            )
        yield f"from another machine, run there first: {tunnel(environment, port)}"


def tunnel(environment: Mapping[str, str], port: int) -> str:
    """The command that brings the port to the machine where someone sits."""
    # SSH_CONNECTION: the client's address and port, then this machine's, as the client sees them.
    _, _, host, ssh_port = environment.get("SSH_CONNECTION", "").split() or ("", "", "", "22")
    if not host:
        host = "THIS-MACHINE" if in_container(environment) else socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have a number and no name.
        user = "USER"
    other = "" if ssh_port == "22" else f"-p {ssh_port} "
    return f"ssh {other}-N -L {port}:127.0.0.1:{port} {user}@{host}"


if __name__ == "__main__":
    main(sys.argv[1:])
