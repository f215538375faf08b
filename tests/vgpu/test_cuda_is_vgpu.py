"""Which names in CUDA programs are replaced with virtual GPU names, and which aren't."""

import ast
import re
import sys

import pytest
import torch

import vgpu
from vgpu import cuda_is_vgpu


def read(source):
    """Return the normalized source after replacement."""
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
        ("patch('torch.cuda.is_available')", "patch('torch.vgpu.is_available')"),
        ("patch('torch.cuda.cudart')", "patch('torch.vgpu.cudart')"),
        ("m = \"on device(type='cuda', index=0)\"", "m = \"on device(type='vgpu', index=0)\""),
        ("m = \"tensor(1., device='cuda:0')\"", "m = \"tensor(1., device='vgpu:0')\""),
        ("init('nccl')", "init('vccl')"),
        ("init('cpu:gloo,cuda:nccl')", "init('cpu:gloo,vgpu:vccl')"),
        ("init('NCCL')", "init('vccl')"),
        ("init(dist.Backend.NCCL)", "init(dist.Backend.VCCL)"),
        ("get_backend() == Backend.NCCL", "get_backend() == Backend.VCCL"),
    ],
)
def test_cuda_names_are_replaced(source, expected):
    found, reading = read(source)
    assert found == ast.unparse(ast.parse(expected))
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
        "x = 'torch.cuda is not available'",
        "import jax as th\nth.cuda",
    ],
)
def test_other_names_are_left_alone(source):
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
def test_cuda_names_in_command_line_arguments_are_replaced(argument, expected):
    assert cuda_is_vgpu.replace_in_argument(argument) == expected


def test_a_method_called_cuda_gets_both_names():
    """This includes methods that call their superclass's method, and methods of classes defined in
    functions, but not local functions.
    """
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


def test_names_are_replaced_in_files_that_mention_cuda_except_torchs(tmp_path):
    finder = cuda_is_vgpu.Finder(read=["numba"], not_read=["mine.kernels"])
    for name, chosen in {
        "accelerate.utils": True, "torch.cuda": False, "torchvision.ops": True, "numba.core": True,
        "torch.testing._internal.common_cuda": True, "mine": True, "mine.kernels.fast": False,
    }.items():  # fmt: skip
        assert finder.is_chosen(name) == chosen, name
    (tmp_path / "speaks.py").write_text("DEVICE = 'cuda'\n")
    (tmp_path / "silent.py").write_text("DEVICE = 'cpu'\n")
    path = [str(tmp_path)]
    assert isinstance(finder.find_spec("speaks", path).loader, cuda_is_vgpu._Loader)
    assert finder.find_spec("silent", path) is None
    for module in ("ast", "multiprocessing.context", "vgpu.cuda_is_vgpu"):
        assert finder.find_spec(module, None) is None, module


def test_replacements_are_counted_in_packages_and_listed_in_own_files(monkeypatch):
    installed = cuda_is_vgpu.Replacements("/venv/lib/site-packages/accelerate/state.py")
    own = cuda_is_vgpu.Replacements("/home/project/train.py", {"cuda": [3]})
    monkeypatch.setattr(cuda_is_vgpu, "replaced_in", [installed, own, installed])
    lines, packages = cuda_is_vgpu.replaced()
    assert lines == ["train.py: reads cuda as vgpu in line 3"] and packages == {"accelerate": 2}


@pytest.mark.virtual_gpus(2, gpu="H100")
def test_cuda_only_names_exist_and_raise_when_used():
    assert not hasattr(torch.vgpu, "CUDAGraph")
    cuda_is_vgpu.install()
    try:
        from torch.vgpu import CUDAPluggableAllocator, MemPool, StreamContext, graphs, nccl

        class Pool(MemPool):
            pass

        uses = {
            "torch.cuda.CUDAGraph": torch.vgpu.CUDAGraph,
            "torch.cuda.MemPool": Pool,
            "torch.cuda.StreamContext": lambda: StreamContext(None),
            "torch.cuda.CUDAPluggableAllocator": lambda: CUDAPluggableAllocator("a", "b", "c"),
            "torch.cuda.nccl.all_reduce": nccl.all_reduce,
            "torch.cuda._sleep": lambda: torch.vgpu._sleep(10),
            "torch.cuda.graphs.make_graphed_callables": graphs.make_graphed_callables,
        }
        for name, use in uses.items():
            refused = f"{re.escape(name)} was used, but virtual GPUs don't support it"
            with pytest.raises(NotImplementedError, match=refused):
                use()
        assert not isinstance(torch.ones(1, device="vgpu"), torch.vgpu.CUDAGraph)
        assert not torch.vgpu.is_current_stream_capturing()
        assert torch.vgpu.get_arch_list() == ["sm_90"]
        assert torch.vgpu.default_generators[1].device == torch.device("vgpu:1")
        assert torch.vgpu.has_magma
        if torch.distributed.is_nccl_available():
            assert nccl.version() == torch.cuda.nccl.version()
        from torch.vgpu.amp import autocast_mode, grad_scaler

        assert autocast_mode.autocast is torch.vgpu.amp.autocast
        assert grad_scaler.GradScaler is torch.vgpu.amp.GradScaler
        assert torch.vgpu.streams.Stream is torch.vgpu.Stream
        if not torch.cuda.is_available():  # as torch.testing sets streams in CUDA tests
            other = torch.vgpu.Stream(1)
            torch._C._cuda_setStream(other.stream_id, other.device_index, other.device_type)
            assert torch.vgpu.current_stream(1) == other
            torch.vgpu.set_stream(torch.vgpu.default_stream(1))
            torch._C._cuda_setDevice(0)
            assert torch.vgpu.current_device() == 0
        torch.ones(1).to("vgpu")
    finally:
        cuda_is_vgpu.uninstall()
    assert not hasattr(torch.vgpu, "CUDAGraph") and "torch.vgpu.nccl" not in sys.modules


def test_names_in_cells_are_replaced_while_the_extension_is_loaded():
    ip = pytest.importorskip("IPython").core.interactiveshell.InteractiveShell()
    ip.run_line_magic("load_ext", "vgpu")
    try:
        ip.run_cell("import torch as th\nseen = []")
        ip.run_cell(
            "seen.append((th.ones(1).cuda().device.type == 'cuda', th.cuda.is_available()))"
        )
        ip.run_line_magic("unload_ext", "vgpu")
        ip.run_cell("seen.append('cuda')")
        assert ip.user_ns["seen"] == [(True, True), "cuda"]
    finally:
        vgpu.disable()
