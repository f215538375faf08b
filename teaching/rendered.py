"""Lessons with their outputs, run here and now, for the book and the slides."""

import hashlib
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from teaching import lessons

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
CELL_SECONDS = 300
LIVE_ONLY = "*This explorer has sliders: it lives in JupyterLab.*"


def run(path: Path, cache: Path) -> nbformat.NotebookNode:
    """A lesson, executed top to bottom in a fresh kernel; kept in ``cache`` until it changes.

    A widget is replaced by what it showed at first, and a sentence that it is live only. Raises
    nbclient.exceptions.CellExecutionError if a cell fails.
    """
    kept = cache / f"{path.stem}-{_digest(path)}.ipynb"
    if not kept.exists():
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as progress:
            environment = os.environ | {"COURSE_PROGRESS_DIR": progress}
            client = NotebookClient(
                notebook,
                timeout=CELL_SECONDS,
                resources={"metadata": {"path": str(path.parent)}},
                # A kernel warns on the terminal that it listens on this machine.
                extra_arguments=["--log-level=ERROR"],
            )
            client.execute(env=environment)
        _settle(notebook)
        cache.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, kept)
    return nbformat.read(kept, as_version=4)


def _digest(path: Path) -> str:
    """Changes with the lesson and with the package behind it."""
    digest = hashlib.sha256(path.read_bytes())
    for source in sorted((lessons.ROOT / "helpers").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _settle(notebook: nbformat.NotebookNode) -> None:
    kept = notebook.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs = []
        for output in cell.outputs:
            if WIDGET in output.get("data", {}):
                looks = _first_look(output["data"][WIDGET]["model_id"], kept)
                data = {"text/markdown": LIVE_ONLY, "text/plain": LIVE_ONLY.strip("*")}
                # A progress bar is a widget too, and shows nothing that would be missed.
                if looks:
                    outputs += [*looks, nbformat.v4.new_output("display_data", data=data)]
            else:
                outputs.append(output)
        cell.outputs = outputs


def _first_look(model_id: str, kept: dict) -> list[nbformat.NotebookNode]:
    """What the outputs inside a widget showed when the notebook had run, in order."""
    state = kept.get(model_id, {}).get("state", {})
    shown = [nbformat.from_dict(output) for output in state.get("outputs", [])]
    for child in state.get("children", []):
        shown += _first_look(child.removeprefix("IPY_MODEL_"), kept)
    return shown
