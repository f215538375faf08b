"""Lesson code that runs only on real GPUs is tested with ``cuda`` read as ``vgpu``.

Every cell that checks for real GPUs runs, with the cells that it needs, on virtual GPUs as it would
on real ones. Its branches for machines without GPUs are removed first.
"""

import ast

import pytest
import runs
import torch
from needed_cells import needed

import vgpu
from teaching import lessons
from vgpu import cuda_is_vgpu
from vgpu.profiling import memory

QUESTION = "torch.cuda.is_available()"
WORDS = ("cuda", "vgpu")

# Replaces programs that lessons start from a shell. Each is a fork of this process, which has
# imported torch, and sees four GPUs, except those that CUDA_VISIBLE_DEVICES hides. PyTorch itself
# reads the variable.
HANDED = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
BEFORE = f"""
import contextlib, io, itertools, json, os, torch
import vgpu; from helpers import shell; from vgpu import launch
from vgpu import cuda_is_vgpu
from vgpu.collectives import process_groups

if not vgpu.is_enabled():
    vgpu.enable(2)

def run(function, ranks, plain=launch.run):
    assert ranks == 1  # the other ranks of such a group do not exist
    def on_rank(rank, world_size):
        process_groups.ranks_are_absent = True  # the group then rejects CPU tensors, as NCCL does
        return function(rank, world_size)
    return plain(on_rank, ranks, gpu="V100")

patch("vgpu.launch.run", run)

def run_lines(lines, files):
    lines = [line.replace("python ", "python handed.py ") for line in lines]
    for result in (results := shell.run_lines(lines, {{"handed.py": {HANDED!r}}})):
        assert not result.status, result
    return [output_of(result, files) for result in results]

def output_of(result, files):
    environment, (name,) = json.loads(result.output)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ.clear()
            os.environ.update(environment)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                drive(files[name], name)
            os.write(writer, printed.getvalue().encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as file:
        output = file.read()
    assert os.waitpid(child, 0)[1] == 0, result.line
    return shell.Result(result.line, 0, output.strip(), "")

def drive(program, name):
    vgpu.enable(4)
    visible = list(itertools.takewhile(lambda card: card < 4, torch.cuda._parse_visible_devices()))
    properties = torch.vgpu.get_device_properties
    torch.vgpu.device_count = lambda: len(visible)
    torch.vgpu.get_device_properties = lambda ordinal: properties(visible[ordinal])
    exec(cuda_is_vgpu.compile_source(program, name), {{"__name__": "__main__"}})
"""
# How long virtual GPUs take to copy is meaningless: a cell that measures it gets a fake clock.
COUNTING_CLOCK = """
import itertools, types
time = types.SimpleNamespace(perf_counter=itertools.count().__next__)
"""


def on_real(test):
    """Return whether a condition is true on real GPUs, or None if it isn't about them."""
    if ast.unparse(test) == QUESTION:
        return True
    match test:
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=word)]) if word in WORDS:
            return word == "cuda"
    return None


def conditions(tree):
    """Return every ``if`` statement or expression whose condition contains one of WORDS."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp))
    return [node for node in nodes if any(word in ast.unparse(node.test) for word in WORDS)]


def asks(cell):
    """Return whether a code cell checks for real GPUs in any way."""
    return cell.is_code and (QUESTION in cell.source or bool(conditions(ast.parse(plain(cell)))))


def plain(cell):
    """Return a cell's source, or an empty string if it starts with an IPython magic."""
    return "" if cell.source.startswith("%") else cell.source


ASKING = {
    path: [cell.id for cell in lessons.cells(path) if asks(cell)] for path in lessons.NOTEBOOKS
}


class _OnRealGPUs(ast.NodeTransformer):
    """Replaces each condition about real GPUs with its branch for them."""

    def visit_If(self, node):
        self.generic_visit(node)
        real = on_real(node.test)
        return node if real is None else node.body if real else node.orelse

    visit_IfExp = visit_If


def on_real_gpus(source):
    """Return a cell's code as it would run on real GPUs, with the names of virtual ones."""
    tree = _OnRealGPUs().visit(ast.parse(source))
    tree = cuda_is_vgpu.Replacer(cuda_is_vgpu.Replacements("<cell>")).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def test_lessons_check_for_real_gpus_only_in_known_ways():
    found = {}
    for path in lessons.NOTEBOOKS:
        for cell in filter(asks, lessons.cells(path)):
            for node in conditions(ast.parse(plain(cell))):
                found[f"{path.stem}: {ast.unparse(node.test)}"] = on_real(node.test)
    assert sum(map(len, ASKING.values())) >= 3 and found
    unknown = [name for name, real in found.items() if real is None]
    assert not unknown, f"add to on_real which branch is for real GPUs: {unknown}"


@pytest.mark.parametrize(
    "path", [path for path in ASKING if ASKING[path]], ids=lambda path: path.stem[:2]
)
def test_the_branches_for_real_gpus_run(path):
    cells = lessons.cells(path)
    for name in ASKING[path]:
        position = [cell.id for cell in cells].index(name)
        asking = lessons.Cell(name, "code", on_real_gpus(cells[position].source), ())
        before = BEFORE + COUNTING_CLOCK * ("perf_counter" in asking.source)
        run = runs.run_of(needed([*cells[:position], asking]), before)
        assert runs.outcome(run) == ("", ""), name


def test_the_branch_without_gpus_is_removed():
    source = 'if kind == "vgpu":\n    a()\nelse:\n    b(1 if torch.cuda.is_available() else 2)'
    assert on_real_gpus(source) == "b(1)"
    assert on_real_gpus('if kind == "cuda":\n    a("cuda:1")') == "a('vgpu:1')"
    assert on_real_gpus('x = kind == "cuda"') == "x = kind == 'vgpu'"


def test_capacity_limits_a_real_gpu():
    names = {"vgpu": vgpu}
    with open(memory.__file__, encoding="utf-8") as file:
        exec(cuda_is_vgpu.compile_source(file.read(), memory.__file__), names)
    with vgpu.enable(1):
        gpu, wanted = torch.device("vgpu:0"), pytest.raises(torch.OutOfMemoryError, match="allowed")
        with names["capacity"](gpu, 2**20), wanted:
            torch.empty(2**20, device=gpu)
        assert torch.empty(2**20, device=gpu).nbytes == 2**22
