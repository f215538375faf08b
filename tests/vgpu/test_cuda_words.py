"""Which words of a program written for CUDA are read for virtual GPUs, and which are not."""

import ast

import pytest

from helpers.vgpu import cuda_words


def read(source):
    """The source as it is read, normalised."""
    reading = cuda_words.Reading("x.py")
    return ast.unparse(cuda_words._Reader(reading).visit(ast.parse(source))), reading


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.cuda.is_available()", "torch.vgpu.is_available()"),
        ("model.cuda()", "model.vgpu()"),
        ("x.cuda(3, non_blocking=True)", "x.vgpu(3, non_blocking=True)"),
        ("x.is_cuda", "x.is_vgpu"),
        ("import torch.cuda.amp as amp", "import torch.vgpu.amp as amp"),
        ("from torch.cuda import Stream", "from torch.vgpu import Stream"),
        ("from torch import cuda", "from torch import vgpu as cuda"),
        ("d = 'cuda'", "d = 'vgpu'"),
        ("d = 'cuda:12'", "d = 'vgpu:12'"),
        ("d = f'cuda:{rank}'", "d = f'vgpu:{rank}'"),
        ("init('nccl')", "init('vccl')"),
        ("init('cpu:gloo,cuda:nccl')", "init('cpu:gloo,vgpu:vccl')"),
    ],
)
def test_read_for_virtual_gpus(source, expected):
    found, reading = read(source)
    assert found == expected
    assert reading.lines and "line 1" in str(reading)


@pytest.mark.parametrize(
    "source",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.version.cuda",
        "args.cuda",
        "cuda = 3",
        "print('uses cuda here')",
        "import numba.cuda",
        "from numba import cuda",
        "x = 'nccl is a library'",
        "x = 'barracuda'",
    ],
)
def test_left_alone(source):
    found, reading = read(source)
    assert found == source and not reading.lines
