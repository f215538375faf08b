"""JupyterLab as a user operates it: its own server, a browser, and what's on the page."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from teaching.lessons import ROOT

TOKEN = "browser-tests"
# A lesson takes at most a minute, or several times that on a busy machine.
LESSON_S = 400
RUN_ALL = "notebook:run-all-cells"


@contextmanager
def served(folder: Path, scratch: Path, settings: dict[str, dict] | None = None):
    """Serve ``folder`` with JupyterLab; yield its address. settings: values by plugin id."""
    for plugin, values in (settings or {}).items():
        package, name = plugin.split(":")
        path = scratch / "settings" / package / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    environment = dict(
        os.environ,
        VGPU_DEVICES="vgpu",
        JUPYTER_CONFIG_PATH=str(ROOT / ".jupyter"),
        COURSE_PROGRESS_DIR=str(scratch / "progress"),
        JUPYTER_RUNTIME_DIR=str(scratch / "runtime"),
        JUPYTERLAB_SETTINGS_DIR=str(scratch / "settings"),
        JUPYTERLAB_WORKSPACES_DIR=str(scratch / "workspaces"),
    )
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={TOKEN}"),
        *(f"--ServerApp.root_dir={folder}", "--expose-app-in-browser"),
    ]
    with (scratch / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield _address(server, scratch)
    finally:
        server.terminate()
        server.wait(timeout=60)


def _address(server: subprocess.Popen, scratch: Path) -> str:
    """Return the server's address as soon as the server responds."""
    found = scratch / "runtime" / f"jpserver-{server.pid}.json"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert server.poll() is None, (scratch / "server.log").read_text()
        try:
            address = json.loads(found.read_text())["url"]
            _request(address, "GET", "status")
        except (OSError, ValueError):
            # The file exists before it has any text, and has its text before the port is open.
            time.sleep(0.1)
        else:
            return address
    raise TimeoutError("JupyterLab did not start within 180 s")


def end_kernels(address: str) -> None:
    """Shut down all kernels of a server, as Kernel > Shut Down All Kernels does."""
    for session in json.loads(_request(address, "GET", "sessions")):
        _request(address, "DELETE", f"sessions/{session['id']}")


def _request(address: str, method: str, path: str) -> bytes:
    request = urllib.request.Request(
        f"{address}api/{path}", method=method, headers={"Authorization": f"token {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


class Lesson:
    """One lesson open in JupyterLab."""

    def __init__(self, page, address: str, name: str, expanded: bool) -> None:
        self.page = page
        page.goto(f"{address}lab/tree/{name}?token={TOKEN}&reset")
        page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell", timeout=120_000)
        self.wait_for("p => p.sessionContext.session?.kernel?.status === 'idle'", 120)
        if expanded:
            self.command("notebook:expand-all-headings")

    def ask(self, function: str, *args):
        """Return the value of a JavaScript function, called with the open panel and ``args``."""
        arrow = "([f, a]) => eval(f)(window.jupyterapp.shell.currentWidget, ...a)"
        return self.page.evaluate(arrow, [function, list(args)])

    def wait_for(self, condition: str, seconds: float) -> None:
        """Wait until a JavaScript condition on the panel is true."""
        arrow = "f => { const p = window.jupyterapp.shell.currentWidget; return p && eval(f)(p); }"
        self.page.wait_for_function(arrow, arg=condition, timeout=seconds * 1000, polling=100)

    def command(self, name: str) -> None:
        """Run one of JupyterLab's commands, as its menu does, without waiting for it to finish."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name); }", name)

    def run_all(self, seconds: float = LESSON_S) -> None:
        """Run All Cells, and wait until the last code cell has run."""
        self.command(RUN_ALL)
        # Cells are executed in order: once the last one has a count, all of them have run.
        done = """p => {
          const code = [...p.content.model.cells].filter(c => c.type === 'code');
          return code.every(c => c.executionState === 'idle' && c.executionCount)
              || code.some(c => c.outputs.toJSON().some(o => o.output_type === 'error'));
        }"""
        self.wait_for(done, seconds)

    def cells(self) -> list[dict]:
        """Return each cell's id, kind, tags, source and outputs."""
        return self.ask("""p => [...p.content.model.cells].map(c => ({
          id: c.id, kind: c.type, tags: c.metadata.tags ?? [], source: c.sharedModel.getSource(),
          outputs: c.type === 'code' ? c.outputs.toJSON() : []}))""")

    def index(self, tag: str) -> int:
        """Return the index of the only cell that has ``tag``."""
        (found,) = (n for n, cell in enumerate(self.cells()) if tag in cell["tags"])
        return found

    def at(self, index: int):
        """Return a locator for a cell; JupyterLab renders only cells near the visible ones."""
        panel = ".jp-NotebookPanel:not(.lm-mod-hidden)"
        return self.page.locator(f"{panel} .jp-Cell[data-windowed-list-index='{index}']")

    def show(self, index: int):
        """Scroll a cell into view; return its locator."""
        self.ask("(p, n) => { p.content.activeCellIndex = n; p.content.scrollToItem(n); }", index)
        self.at(index).wait_for(state="visible", timeout=30_000)
        return self.at(index)

    def put(self, index: int, source: str) -> None:
        """Replace a code cell's source as a user would: select all, and type ``source``."""
        self.show(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(source)

    def run(self, index: int, seconds: float = 60) -> None:
        """Select a cell, run it with Control+Enter, and wait until it's done."""
        self.show(index).locator(".jp-InputArea-prompt").first.click()
        before = self.count(index)
        self.page.keyboard.press("Control+Enter")
        self.wait_for(
            f"p => {{ const c = p.content.model.cells.get({index});"
            f" return c.executionState === 'idle' && c.executionCount > {before}; }}",
            seconds,
        )

    def count(self, index: int) -> int:
        """Return a code cell's execution count, or 0 before its first run."""
        return self.ask("(p, n) => p.content.model.cells.get(n).executionCount ?? 0", index)

    def text(self, index: int) -> str:
        """Return the text of a code cell's output on the page."""
        return self.show(index).locator(".jp-OutputArea").inner_text()
