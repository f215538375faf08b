"""``--cuda-is-vgpu``: a program written for CUDA runs with the word ``cuda`` replaced by ``vgpu``.

An import hook replaces the word in the syntax trees of the program's own files and of the packages
that it imports, if a file mentions CUDA; torch itself stays unchanged. No file is changed, and line
numbers stay the same. The hook replaces

- ``torch.cuda`` and what is imported from it, ``tensor.cuda()``, ``module.cuda()``, ``is_cuda``; a
  ``def cuda`` in the program gets both names;
- the strings ``"torch.cuda.FloatTensor"`` and ``"torch.cuda.is_available"``, as in ``mock.patch``,
  ``"cuda"``, ``"cuda:0"`` and ``"cuda:"``, ``"cuda:%d"`` and ``"cuda:{}"``, also in an f-string;
  ``nccl`` or ``NCCL`` as the name of a backend, alone or in a list such as
  ``"cpu:gloo,cuda:nccl"``; and ``Backend.NCCL``;
- devices as torch prints them, inside a longer string, such as a message that a test expects:
  ``device(type='cuda', index=0)``, ``device='cuda:0'``.

Everything else stays, for example ``torch.backends.cuda``, ``torch.version.cuda``, and the
program's own names, even in strings that name an attribute: ``getattr(args, "cuda")``,
``dest="cuda"``. A dictionary key ``"cuda"`` counts as a device.

Patching ``torch.cuda`` at run time instead wouldn't work: ``device.type`` comes from C++, so
``device.type == "cuda"`` would be False; C++ also parses ``"cuda"`` in every function that takes a
device; and torch's own CUDA code would call a driver that isn't there.

Packages also import names that only ``torch.cuda`` has. Stand-ins for those are at the end.
"""

import ast
import functools
import importlib.abc
import importlib.util
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from vgpu.collectives.process_groups import BACKEND
from vgpu.memory import gpus
from vgpu.torch_patches import device_module
from vgpu.torch_patches.undo import Changes

_WORD = "cuda"
_ATTRIBUTE_FUNCTIONS = {"getattr", "hasattr", "setattr", "delattr"}
_ATTRIBUTES = {"is_cuda": f"is_{gpus.DEVICE_TYPE}"}
# The patterns match a device, whose index may be filled in later; a printed device; a name in
# torch.cuda; and a backend, or a list of device:backend pairs.
_DEVICE = re.compile(rf"{_WORD}(:(\d+|%[dis]|\{{\w*\}})?)?")
_PRINTED = re.compile(rf"\b(type|device)='{_WORD}\b")
_NAME = re.compile(rf"torch\.{_WORD}(\.\w+)+")
_BACKENDS = re.compile(rf"(\w+:\w+,)*(({_WORD}:)?(nccl|NCCL))(,\w+:\w+)*")


@dataclass
class Replacements:
    """The words that were replaced in one file."""

    filename: str
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Each word's line numbers."""

    def add(self, word: str, line: int) -> None:
        lines = self.lines.setdefault(word, [])
        if line not in lines:
            lines.append(line)

    def __str__(self) -> str:
        replaced = {_WORD: gpus.DEVICE_TYPE, "nccl": BACKEND}
        parts = (
            f"{word} as {replaced[word]} in line{'s' if len(lines) > 1 else ''} "
            f"{', '.join(map(str, sorted(lines)))}"
            for word, lines in sorted(self.lines.items())
        )
        return f"{os.path.basename(self.filename)}: reads {'; '.join(parts)}"


replaced_in: list[Replacements] = []
"""One entry per file in which a word was replaced."""


def replaced() -> tuple[list[str], dict[str, int]]:
    """Return a line for each of the program's files, and the number of files by package."""
    own, packages = [], Counter[str]()
    for replacements in replaced_in:
        package = package_of(replacements.filename)
        if package is None:
            own.append(str(replacements))
        else:
            packages[package] += 1
    return own, packages


def replace_name(text: str) -> str:
    """Translate a device's or backend's name, or printed devices in a string, for virtual GPUs."""
    if _DEVICE.fullmatch(text) or _NAME.fullmatch(text):
        return text.replace(_WORD, gpus.DEVICE_TYPE, 1)
    if _BACKENDS.fullmatch(text):
        text = text.replace(_WORD, gpus.DEVICE_TYPE)
        return text.replace("nccl", BACKEND).replace("NCCL", BACKEND)
    return _PRINTED.sub(rf"\1='{gpus.DEVICE_TYPE}", text)


def replace_in_argument(text: str) -> str:
    """Call ``replace_name`` on a command-line argument, or on its value, as in ``device=cuda``."""
    option, equals, value = text.rpartition("=")
    return option + equals + replace_name(value)


also_change: Callable[[ast.Module, bytes, str], None] | None = None
"""Set by pytest_vgpu: also transforms a module's tree, given its source and file name."""


def compile_source(source: bytes | str, filename: str) -> CodeType:
    """Compile a file with its words replaced; raise SyntaxError as ``compile`` does."""
    return compile(replace(source, filename), filename, "exec", dont_inherit=True)


def replace(source: bytes | str, filename: str) -> ast.Module:
    """Return a file's syntax tree with its words replaced; ``replaced_in`` keeps track of them."""
    replacements = Replacements(filename)
    tree = Replacer(replacements).visit(ast.parse(source, filename))
    if replacements.lines:
        replaced_in.append(replacements)
    return ast.fix_missing_locations(tree)


class Replacer(ast.NodeTransformer):
    """Replaces the words in a syntax tree."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._torch_names = {"torch"}
        self._function_depth = 0  # number of enclosing functions, within the class
        self._own_names: set[ast.expr] = set()  # strings that name the program's own attributes

    def visit_Module(self, node: ast.Module) -> ast.AST:
        imports = (part for part in ast.walk(node) if isinstance(part, ast.Import))
        for alias in (alias for part in imports for alias in part.names):
            if alias.name == "torch" and alias.asname:
                self._torch_names.add(alias.asname)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        of_torch = isinstance(node.value, ast.Name) and node.value.id in self._torch_names
        if node.attr == _WORD and of_torch:
            return self._rename(node, gpus.DEVICE_TYPE)
        if node.attr in _ATTRIBUTES:
            return self._rename(node, _ATTRIBUTES[node.attr])
        if node.attr == "NCCL" and ast.unparse(node.value).endswith("Backend"):
            self._replacements.add("nccl", node.lineno)
            node.attr = BACKEND.upper()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self._own_names |= {keyword.value for keyword in node.keywords if keyword.arg == "dest"}
        if isinstance(node.func, ast.Name) and node.func.id in _ATTRIBUTE_FUNCTIONS:
            of_torch = any(
                isinstance(of, ast.Name) and of.id in self._torch_names for of in node.args[:1]
            )
            self._own_names |= set() if of_torch else set(node.args[1:2])
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == _WORD:
            self._rename(node.func, gpus.DEVICE_TYPE)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | list[ast.AST]:
        self._function_depth += 1
        self.generic_visit(node)
        self._function_depth -= 1
        if node.name != _WORD or self._function_depth:
            return node
        # A method, or a module's function: its callers now use the other name.
        self._replacements.add(_WORD, node.lineno)
        alias = ast.parse(f"{gpus.DEVICE_TYPE} = {_WORD}").body[0]
        return [node, ast.copy_location(alias, node)]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        depth, self._function_depth = self._function_depth, 0
        self.generic_visit(node)
        self._function_depth = depth
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if alias.name == "torch.cuda" or alias.name.startswith("torch.cuda."):
                alias.name = alias.name.replace(_WORD, gpus.DEVICE_TYPE, 1)
                self._replacements.add(_WORD, node.lineno)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        module = node.module or ""
        if module == "torch.cuda" or module.startswith("torch.cuda."):
            node.module = module.replace(_WORD, gpus.DEVICE_TYPE, 1)
            self._replacements.add(_WORD, node.lineno)
        for alias in node.names:
            if module == "torch" and alias.name == _WORD:
                alias.name, alias.asname = gpus.DEVICE_TYPE, alias.asname or _WORD
                self._replacements.add(_WORD, node.lineno)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node in self._own_names:
            return node
        if isinstance(node.value, str) and replace_name(node.value) != node.value:
            for name in (_WORD, "nccl"):
                if name in node.value.lower():
                    self._replacements.add(name, node.lineno)
            node.value = replace_name(node.value)
        return node

    def _rename(self, node: ast.Attribute, name: str) -> ast.Attribute:
        self._replacements.add(_WORD, node.lineno)
        node.attr = name
        return node


# These may mention CUDA, but aren't read: torch, and packages whose "cuda" isn't torch's device.
_NOT_READ = """
    torch torchgen functorch triton vgpu pytest_vgpu cuda nvidia pynvml numba cupy jax jaxlib
    tensorflow keras xgboost lightgbm pygments pip setuptools
"""
_CHOICE = dict.fromkeys(_NOT_READ.split(), False)
_CHOICE["torch.testing._internal"] = True  # the decorators of torch's own tests ask for CUDA
_MENTION = re.compile(rb"cuda|nccl", re.IGNORECASE)
_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib")
)


def mentions_cuda(source: bytes) -> bool:
    return _MENTION.search(source) is not None


def package_of(filename: str) -> str | None:
    """Return the installed package that a file belongs to; None for the program's own files."""
    parts = Path(filename).parts
    for i, part in enumerate(parts[:-1]):
        if part in _PACKAGES:
            return parts[i + 1].removesuffix(".py")
    return None


def _is_pythons_own(filename: str) -> bool:
    path = os.path.realpath(filename)
    return path.startswith(_STANDARD_LIBRARY) and package_of(path) is None


class Finder(importlib.abc.MetaPathFinder):
    """Imports modules that mention CUDA with their words replaced, and all others as Python does.

    ``read`` and ``not_read`` are names of packages or modules, and override ``_CHOICE``.
    """

    def __init__(self, read: Sequence[str] = (), not_read: Sequence[str] = ()) -> None:
        self._choice = _CHOICE | dict.fromkeys(read, True) | dict.fromkeys(not_read, False)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.is_chosen(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            spec = self._found_by_others(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return None
        if _is_pythons_own(spec.origin) or not mentions_cuda(spec.loader.get_data(spec.origin)):
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Find a module with an editable install's finder."""
        for finder in sys.meta_path:
            if isinstance(finder, type) and finder.__name__.startswith("_Editable"):
                return finder.find_spec(fullname, path, target)
        return None

    def is_chosen(self, fullname: str) -> bool:
        """Return the choice for the longest matching prefix of the name; True if there is none."""
        while fullname:
            if fullname in self._choice:
                return self._choice[fullname]
            fullname = fullname.rpartition(".")[0]
        return True


class _Loader(SourceFileLoader):
    """Compiles its file every time: a cached version might have been compiled unchanged."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = replace(source, path)
        if also_change is not None:
            also_change(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


def install(read: Sequence[str] = (), not_read: Sequence[str] = ()) -> Finder:
    """Replace the words in modules imported from now on; return the finder, which comes first.

    ``torch.vgpu`` then has all public names of ``torch.cuda``.
    """
    _add_cuda_names(_changes)
    finder = Finder(read, not_read)
    sys.meta_path.insert(0, finder)
    _changes.callback(sys.meta_path.remove, finder)
    return finder


def uninstall() -> None:
    _changes.close()


_changes = Changes()


# Names that only ``torch.cuda`` has, added to ``torch.vgpu`` if a program's cuda means vgpu
#
# Many packages import such a name, or use it with ``isinstance``, but never call it. So a class,
# function or module of that name exists, and using it raises NotImplementedError. Programs written
# for virtual GPUs don't get these names: there, ``hasattr(torch.vgpu, "CUDAGraph")`` is False.


def _add_cuda_names(changes: Changes) -> None:
    changes.set(device_module, "default_generators", _Generators())
    changes.set(device_module, "has_half", True)
    changes.set(device_module, "has_magma", True)
    changes.set(device_module, "is_current_stream_capturing", lambda: False)
    changes.set(device_module, "get_arch_list", _get_arch_list)
    _complete(device_module, torch.cuda, changes)
    if dist.is_available() and dist.is_nccl_available():  # torch's own function, which needs no GPU
        changes.set(vars(device_module)["nccl"], "version", torch.cuda.nccl.version)
    # This function is private, but tests for streams call it.
    changes.item(vars(device_module), "_sleep", _refusing(f"{torch.cuda.__name__}._sleep", None))
    changes.wrap(torch.amp.GradScaler, "__init__", _for_virtual_gpus)
    # torch.testing uses these names to run CUDA tests on separate streams.
    if not torch.cuda.is_available():
        changes.set(torch._C, "_cuda_setDevice", device_module.set_device)
        changes.set(torch._C, "_cuda_setStream", _set_stream)


class _Generators:
    """A sequence of the GPUs' generators."""

    def __len__(self) -> int:
        return gpus.device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        return gpus.default_generator(gpus.meant_by(index))


def _get_arch_list() -> list[str]:
    """Return the compute capabilities of the GPUs, such as "sm_90"."""
    found = map(device_module.get_device_capability, range(gpus.device_count()))
    return sorted({f"sm_{major}{minor}" for major, minor in found})


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    device_module.set_stream(device_module.Stream(device_index, stream_id=stream_id))


def _complete(
    ours: ModuleType, theirs: ModuleType, changes: Changes, around: dict[int, Any] | None = None
) -> None:
    """Add to a module in ``torch.vgpu`` the names that only its counterpart in ``torch.cuda`` has.

    ``around`` maps the id of an object in ``torch.cuda`` to its counterpart in an enclosing module,
    since ``torch.cuda.amp.autocast_mode.autocast`` is ``torch.cuda.amp.autocast``.
    """
    known = dict(around or {})
    known |= {id(there): vars(ours)[name] for name, there in _public(theirs) if name in vars(ours)}
    for name, there in _public(theirs):
        here = vars(ours).get(name)
        if isinstance(there, ModuleType):
            full_name = f"{_vgpu_name(theirs)}.{name}"
            if here is None:
                here = ModuleType(full_name, f"Names in ``{there.__name__}``, for imports only.")
                changes.set(ours, name, here)
                changes.item(sys.modules, full_name, here)
            _complete(here, there, changes, known)
        elif name not in vars(ours):
            refusing = _refusing(f"{theirs.__name__}.{name}", there)
            changes.set(ours, name, known.get(id(there), refusing))


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield torch's own classes, functions and modules in a module, except tensor types."""
    for name, value in list(vars(module).items()):
        if name.startswith("_") or name.endswith("Tensor"):
            continue
        if isinstance(value, ModuleType):
            if value.__name__ == f"{module.__name__}.{name}":
                yield name, value
        elif callable(value) and str(getattr(value, "__module__", "")).startswith("torch"):
            yield name, value


def _vgpu_name(module: ModuleType) -> str:
    return module.__name__.replace("cuda", gpus.DEVICE_TYPE, 1)


def _refusing(name: str, there: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} was used, but virtual GPUs don't support it: leave it out"
        )

    if isinstance(there, type):
        return type(there.__name__, (), {"__new__": refuse, "__module__": __name__})
    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def _for_virtual_gpus(plain: Any) -> Any:
    """Replace the default device "cuda" of ``torch.amp.GradScaler`` and its subclasses."""

    @functools.wraps(plain)
    def __init__(self: Any, device: str = "cuda", *args: Any, **options: Any) -> None:
        plain(self, gpus.DEVICE_TYPE if device == "cuda" else device, *args, **options)

    return __init__
