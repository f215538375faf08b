"""Work that waits until a reader has stopped running cells."""

import nbformat
from nbclient import NotebookClient

from helpers.widgets.idle import when_idle

LESSON = [
    "from helpers.widgets.idle import when_idle\nran = []\nwhen_idle(lambda: ran.append(True), 0.5)",
    "import time\ntime.sleep(1)\nlen(ran)",
    "import asyncio\nfor _ in range(300):\n    await asyncio.sleep(0.1)\n    if ran: break\nlen(ran)",
]


def test_where_no_kernel_runs_cells_it_never_happens():
    when_idle(lambda: 1 / 0, 0.0)


def test_it_waits_for_cells_that_follow_and_happens_once(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in LESSON]
    lesson = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(lesson, resources={"metadata": {"path": tmp_path}}).execute()
    assert [cell.outputs[0]["data"]["text/plain"] for cell in lesson.cells[1:]] == ["0", "1"]
