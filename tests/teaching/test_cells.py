"""A shell that runs cells."""

import subprocess
import sys

ENDING = """
from IPython.core.interactiveshell import InteractiveShell

from teaching.cells import Shell

InteractiveShell._atexit_once = lambda shell: print("cleared up")
Shell({"__name__": "__main__"}).run("print('ran')", "cell")
"""


def test_the_end_of_a_process_does_not_clean_up_shells():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr
