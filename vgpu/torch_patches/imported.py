"""Changes to modules that torch imports late: made at their import, if it ever comes.

DTensor and FSDP take a second to import, and most programs never do.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vgpu import torch_releases
from vgpu.torch_patches.undo import Changes

Change = Callable[[ModuleType, Changes], None]


def when_imported(name: str, change: Change, changes: Changes) -> None:
    """Call ``change(module, changes)`` now, or as soon as the module has been imported."""
    if name in sys.modules:
        change(sys.modules[name], changes)
        return

    def then(module: ModuleType) -> None:
        with torch_releases.noting_missing(changes.missing):
            change(module, changes)
        torch_releases.report_missing(changes.missing)

    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    changes.callback(finder.remove)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python would, and calls ``then`` once it has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Another loader, with something to do afterwards."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
