"""IPython's kernel, which at its end does all that is to be done then, and is gone."""

import atexit
import os
import runpy
import sys

if __name__ == "__main__":
    atexit.register(os._exit, 0)  # what is registered first is called last
    sys.path[0] = ""  # as for python -m
    runpy.run_module("ipykernel_launcher", run_name="__main__")
