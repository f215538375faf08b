"""Code as a notebook cell defines it: in ``__main__``, with its source only in linecache."""

import itertools
import linecache
import textwrap

from vgpu import launch

_numbers = itertools.count(1)

IMPORTS = """
import ctypes, datetime, os, shutil, signal, sys, threading, time, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from vgpu import launch
"""


def cell(source, **names):
    """Run a cell's source; return its names as a dictionary. Line 1 is the source's first line."""
    filename = f"<cell {next(_numbers)}>"
    text = textwrap.dedent(source).strip() + "\n"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace = {"__name__": "__main__", **names}
    exec(IMPORTS, namespace)
    exec(compile(text, filename, "exec"), namespace)
    return namespace


def run(source, nprocs, *args, **options):
    """``launch.run`` for the function ``main`` that a cell's source defines."""
    return launch.run(cell(source)["main"], nprocs, *args, **options)
