"""Kernels that tests start: they skip nothing of their end but taking Python down."""

import nbformat
from nbclient import NotebookClient

CELL = """
import atexit, pathlib, sys
atexit.register(pathlib.Path("done at the end").touch)
print(sys.orig_argv[1].endswith("support/ending/kernels/python3/kernel.py"))
"""


def test_what_is_registered_is_done_at_a_kernel_s_end(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(tmp_path)}},
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute()
    assert notebook.cells[0].outputs[0].text == "True\n"
    assert (tmp_path / "done at the end").exists()
