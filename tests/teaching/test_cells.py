"""The shell that runs a notebook's cells."""

import subprocess
import sys

ENDING = """
from IPython.core.interactiveshell import InteractiveShell

from teaching.cells import Shell

InteractiveShell._atexit_once = lambda shell: print("cleared up")
Shell({"__name__": "__main__"}).run("print('ran')", "cell")
"""


def test_shells_are_not_cleaned_up_when_the_process_exits():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr
