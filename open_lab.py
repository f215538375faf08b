"""Open JupyterLab at lesson 00, even over SSH, in a container, in a codespace or as root.

``make lab ARGS="--port 9999"`` runs it; without make: ``.venv/bin/python open_lab.py --port 9999``.
Options are passed to JupyterLab and override the settings here.
"""

import os
import sys
from pathlib import Path

from jupyterlab.labapp import LabApp
from traitlets.config import Config


def main():
    root = Path(__file__).resolve().parent
    # JupyterLab renders whole lessons, so links find their heading, and doesn't check for
    # news.
    os.environ.setdefault("JUPYTER_CONFIG_PATH", str(root / ".jupyter"))
    config = Config()
    config.ServerApp.root_dir = str(root / "notebooks")
    config.LabApp.default_url = "/lab/tree/00_start_here.ipynb"
    config.ServerApp.ip = "127.0.0.1"
    config.ServerApp.answer_yes = True  # Ctrl+C stops it without asking
    config.ServerApp.allow_root = True
    config.Application.log_level = "WARN"
    config.ServerApp.open_browser = sits_here()
    if "CODESPACE_NAME" in os.environ:
        # The browser's requests come from the address under which the codespace exposes the port.
        name = os.environ["CODESPACE_NAME"]
        config.ServerApp.allow_origin_pat = rf"https://{name}-\d+\.app\.github\.dev$"
        config.ServerApp.allow_remote_access = True
    server = LabApp.initialize_server(sys.argv[1:], config=config)
    if "SSH_CONNECTION" in os.environ:
        user, port = os.environ.get("USER", "USER"), server.port
        # The client's address and port, then this machine's, as the client sees them.
        host = os.environ["SSH_CONNECTION"].split()[2]
        print(f"lab: on your own machine, run: ssh -N -L {port}:127.0.0.1:{port} {user}@{host}")
    print("lab: Ctrl+C stops JupyterLab and all kernels.", flush=True)
    server.start()


def sits_here():
    """Return whether the user would see a browser that opens on this machine."""
    elsewhere = {"SSH_CONNECTION", "VSCODE_IPC_HOOK_CLI", "CODESPACES", "container"}
    screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return bool(screen) and not (elsewhere & os.environ.keys() or os.path.exists("/.dockerenv"))


if __name__ == "__main__":
    main()
