"""Processes that do all that is to be done at their end, and are gone.

Python would then take itself down, object by object: a second of computing once torch is imported,
and more in a worker of pytest-xdist, with five thousand tests. To be imported ahead of torch.
"""

import atexit
import os
from pathlib import Path

JUPYTER = Path(__file__).parent
"""As JUPYTER_PATH: kernels that end so."""

# Nobody asks for the exit status of a worker. What is registered first is called last.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
