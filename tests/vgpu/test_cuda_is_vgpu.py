"""Which words of a program written for CUDA are read for virtual GPUs, and which are not."""

import ast

import pytest

from vgpu import cuda_is_vgpu


def read(source):
    """The source as it is read, normalised."""
    reading = cuda_is_vgpu.Replacements("x.py")
    return ast.unparse(cuda_is_vgpu.Replacer(reading).visit(ast.parse(source))), reading


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
        ("getattr(torch, 'cuda')", "getattr(torch, 'vgpu')"),
        ("getattr(args, 'device', 'cuda')", "getattr(args, 'device', 'vgpu')"),
        ("d = f'cuda:{rank}'", "d = f'vgpu:{rank}'"),
        ("d = 'cuda:' + str(rank)", "d = 'vgpu:' + str(rank)"),
        ("d = 'cuda:%d' % rank", "d = 'vgpu:%d' % rank"),
        ("d = 'cuda:{}'.format(rank)", "d = 'vgpu:{}'.format(rank)"),
        ("import torch as th\nth.cuda.synchronize()", "import torch as th\nth.vgpu.synchronize()"),
        ("x.type('torch.cuda.HalfTensor')", "x.type('torch.vgpu.HalfTensor')"),
        ("init('nccl')", "init('vccl')"),
        ("init('cpu:gloo,cuda:nccl')", "init('cpu:gloo,vgpu:vccl')"),
        ("init('NCCL')", "init('vccl')"),
        ("init(dist.Backend.NCCL)", "init(dist.Backend.VCCL)"),
        ("get_backend() == Backend.NCCL", "get_backend() == Backend.VCCL"),
    ],
)
def test_words_of_cuda_are_replaced(source, expected):
    found, reading = read(source)
    assert found == expected
    assert reading.lines and f"line {1 + source.count(chr(10))}" in str(reading)


@pytest.mark.parametrize(
    "source",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.version.cuda",
        "args.cuda",
        "setattr()",
        "getattr(args, 'cuda', False) and hasattr(args, 'cuda')",
        "parser.add_argument('--no-cuda', dest='cuda', action='store_false')",
        "cuda = 3",
        "print('uses cuda here')",
        "import numba.cuda",
        "from numba import cuda",
        "x = 'nccl is a library'",
        "x = 'barracuda'",
        "x = 'cuda: out of memory'",
        "import jax as th\nth.cuda",
    ],
)
def test_other_words_are_left_alone(source):
    found, reading = read(source)
    assert found == source and not reading.lines


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("cuda", "vgpu"),
        ("--device=cuda:1", "--device=vgpu:1"),
        ("trainer.device=cuda", "trainer.device=vgpu"),
        ("--backend=nccl", "--backend=vccl"),
        ("--out=cuda.txt", "--out=cuda.txt"),
        ("cuda=on", "cuda=on"),
    ],
)
def test_words_in_arguments_of_the_command_are_replaced(argument, expected):
    assert cuda_is_vgpu.replace_in_argument(argument) == expected


def test_a_method_called_cuda_goes_by_both_names():
    """Also one that calls its superclass's, of a class made in a function; not a local function."""
    source = """
def make():
    def cuda():
        return "local"
    class Base:
        def cuda(self):
            self.moved = ["base"]
            return self
    class Batch(Base):
        if True:
            def cuda(self):
                super().cuda()
                self.moved.append(cuda())
                return self
    return Batch()
found = make().cuda().moved, make().cuda.__name__
"""
    namespace = {}
    exec(cuda_is_vgpu.compile_source(source, "x.py"), namespace)
    reading = cuda_is_vgpu.replaced_in.pop()
    assert namespace["found"] == (["base", "local"], "cuda")
    assert sorted(reading.lines["cuda"]) == [6, 11, 12, 16]


def test_only_the_programs_own_files_are_changed():
    everywhere = cuda_is_vgpu.Finder("/")
    assert everywhere.is_of_program("/train.py")
    for module in (ast, pytest, cuda_is_vgpu):
        assert not everywhere.is_of_program(module.__file__), module
    assert not cuda_is_vgpu.Finder("/project").is_of_program("/project2/train.py")
