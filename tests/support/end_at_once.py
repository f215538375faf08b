"""Imported early: a worker of pytest-xdist ends once all is done that is to be done at its end.

Python would then take itself down, object by object: seconds for torch and five thousand tests.
"""

import atexit
import os

# Nobody asks for the exit status of a worker. What is registered first is called last.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
