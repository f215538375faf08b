"""Answers run as in the learner's notebook, cell by cell."""

import json

from learners import SOLUTIONS, hand_in, statuses

AS_IN_A_NOTEBOOK = """
%matplotlib widget
%load_ext a_formatter_that_only_the_learner_has
%a_magic_that_only_the_learner_has
import asyncio
await asyncio.sleep(0)
display("shown")
len?
files = !ls /
assert files
left = (17
% 5)
assert left == 2
text = '''
%d GPUs
! nothing
''' % 8
assert text == "\\n8 GPUs\\n! nothing\\n"
"""


def test_answers_run_as_in_a_notebook_and_know_the_names_of_earlier_ones(tmp_path):
    hand_in(
        tmp_path,
        "one",
        {
            "4.1": AS_IN_A_NOTEBOOK + SOLUTIONS["4.1"],
            "4.2": "%%time\nassert left == 2\n" + SOLUTIONS["4.2"],
            "4.3": "assert replica_sizes(16, 8)\n" + SOLUTIONS["4.3"],
        },
    )
    # A process that has ended takes no names along: the answers before it are run again.
    hand_in(tmp_path, "two", {**SOLUTIONS, "4.2": "import os; os._exit(3)"})
    notebook = json.loads(next(tmp_path.glob("two/*/*.ipynb")).read_text("utf-8"))
    (place,) = (
        index
        for index, cell in enumerate(notebook["cells"])
        if "stub-4.3" in cell["metadata"].get("tags", ())
    )
    trial = {"cell_type": "code", "metadata": {}, "source": "assert replica_sizes(16, 8)\n1 / 0"}
    notebook["cells"].insert(place, trial)
    next(tmp_path.glob("two/*/*.ipynb")).write_text(json.dumps(notebook), "utf-8")
    found = statuses(tmp_path)
    assert {found["one", name].status for name in SOLUTIONS} == {"right"}, found
    assert found["two", "4.1"].status == "right"
    assert "exit code 3" in found["two", "4.2"].message
    # The cell that failed is not the one that is asked for; its first line knew the name.
    assert found["two", "4.3"].status == "right"


def test_a_cell_that_fails_is_named_if_the_answer_is_not_right(tmp_path):
    hand_in(tmp_path, "one", {"4.3": "1 / 0"})
    found = statuses(tmp_path)
    assert found["one", "4.3"].status == "error"
    assert found["one", "4.3"].message == "ZeroDivisionError: division by zero"
