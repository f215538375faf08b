"""What ``make test`` takes a sample of, and the public CI runs whole: ``TESTS=whole``.

PyTorch's own suites, random programs, cells that run twice, and two hosts. CONTRIBUTING.md says how
much of each; a sample is the same each time and has something of every kind.
"""

import os

WHOLE = os.environ.get("TESTS") == "whole"
