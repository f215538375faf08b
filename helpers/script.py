"""Show parts of ``notebooks/train.py`` in a lesson, and run it in a shell.

show_lines("divide")             # a function, as it is in the file
show_lines("train: if step")     # train's first statement that starts with this text
output = run_line("torchrun --nproc-per-node 2 -m vgpu train.py --tp 2 --steps 20")
printed_losses(output)           # {10: 2.889254, 20: 2.730862}
"""

import ast
import re
import shlex
import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path

from IPython.display import Markdown

from helpers import checkpoints, gpt, shell
from vgpu.plan import parallel_model

TORCHRUN = "python -m torch.distributed.run --standalone"
"""What the ``torchrun`` command runs, with its own rendezvous."""


def _files() -> list[Path]:
    """Return the notebooks folder's script, which learners may have modified, and its helpers."""
    helpers = Path(gpt.__file__), Path(checkpoints.__file__), Path(parallel_model.__file__)
    return [Path("train.py"), *helpers]


def show_lines(*names: str) -> Markdown:
    """Return the lines that define functions, classes, methods ("Checkpoints.save") or constants.

    "train: if step" stands for the first statement in ``train`` that starts with "if step". Raises
    ValueError for a name that neither the script nor its helpers define.
    """
    found: dict[str, str] = {}
    for path in _files():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for name, node in _definitions(ast.parse(text)).items():
            parts = {name: node}
            for wanted in names:
                within, _, start = wanted.partition(": ")
                if within == name and start and (first := _starting(node, lines, start)):
                    parts[wanted] = first
            for part, each in parts.items():
                place = path if path.parent == Path() else Path(path.parent.name, path.name)
                where = f"lines {each.lineno} to {each.end_lineno}"
                if each.lineno == each.end_lineno:
                    where = f"line {each.lineno}"
                head = f"# {place.as_posix()}, {where}"
                own = textwrap.dedent("\n".join(lines[each.lineno - 1 : each.end_lineno]))
                found.setdefault(part, f"{head}\n{own}")
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"train.py does not define {unknown[0]!r}; it has {', '.join(found)}")
    return Markdown("```python\n" + "\n\n\n".join(found[name] for name in names) + "\n```")


def _starting(node: ast.stmt, lines: Sequence[str], start: str) -> ast.stmt | None:
    """Return the first statement within ``node`` whose line starts with ``start``."""
    inside = [each for each in ast.walk(node) if isinstance(each, ast.stmt)]
    inside = [each for each in inside if lines[each.lineno - 1].lstrip().startswith(start)]
    return min(inside, key=lambda each: each.lineno, default=None)


def _definitions(body: ast.Module | ast.ClassDef, within: str = "") -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[within + node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[within + node.targets[0].id] = node
        if isinstance(node, ast.ClassDef):
            found |= _definitions(node, f"{node.name}.")
    return found


def run_line(line: str, timeout_s: float = 600) -> str:
    """Run a command line with ``train.py``, show it and its output, and return the output.

    Each process uses one thread. Raises RuntimeError with the command's stderr if it fails.
    """
    typed = line.replace("train.py", shlex.quote(str(Path("train.py").resolve())))
    typed = re.sub(r"^torchrun\b", TORCHRUN, typed)
    [result] = shell.run_lines([f"OMP_NUM_THREADS=1 {typed}"], {}, timeout_s)
    print(f"$ {line}\n{result.output}")
    if result.status:
        status = f"it exited with status {result.status}"
        if result.status == -signal.SIGKILL:
            status += ", killed: often because the machine is out of memory"
        raise RuntimeError(f"{status}:\n{result.errors[-3000:]}")
    return result.output


def printed_losses(output: str) -> dict[int, float]:
    """Return the loss, averaged over ranks, at each step that was printed."""
    found = re.findall(r"step (\d+): loss ([\d.]+)", output)
    return {int(step): float(loss) for step, loss in found}


def printed_step_s(output: str) -> float:
    """Return the step time that ``python -m vgpu --cluster`` printed, in seconds."""
    found = re.search(r"a step takes ([\d.]+) (s|ms|µs)", output)
    if not found:
        raise ValueError(f"the output has no predicted step time:\n{output}")
    return float(found[1]) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[found[2]]
