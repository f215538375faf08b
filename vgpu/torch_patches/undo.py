"""Replace names in torch, and undo the replacements.

Each file that replaces something in torch has an ``install(changes)`` function; ``backend.py``
calls all of them, and reverts all changes when virtual GPUs are disabled.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Callable, MutableSet, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from vgpu import torch_releases

_MISSING = object()


class Changes(contextlib.ExitStack):
    """A stack of changes; closing it undoes them, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: list[str] = []
        """Names that were to be replaced but don't exist, for ``torch_releases.report_missing``."""

    def _lacks(self, owner: Any, name: str) -> bool:
        if hasattr(owner, name):
            return False
        self.missing.append(torch_releases.name_of(owner, name))
        return True

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class; a private one must already exist."""
        if re.match("_[^_]", name) and self._lacks(owner, name):
            return
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        if before is _MISSING:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute with ``make(attribute)``."""
        if not self._lacks(owner, name):
            self.set(owner, name, make(getattr(owner, name)))

    def wrap_function(
        self, name: str, make: Callable[[Any], Any], *owners: Any, for_classes: bool = True
    ) -> None:
        """Replace a function in all modules that have it; ``__torch_function__`` can override it.

        ``__torch_function__`` gets the same new function that the modules have, so it can compare
        the two. Without ``for_classes``, only modes can override it, as with the functions in
        torch.overrides.get_ignored_functions.
        """
        if self._lacks(owners[0], name):
            return
        made = make(getattr(owners[0], name))

        @functools.wraps(made)
        def public(*args: Any, **kwargs: Any) -> Any:
            # has_torch_function only considers modes if there are arguments.
            given = (*args, *kwargs.values()) if for_classes else (None,)
            if has_torch_function(given):
                return handle_torch_function(public, given, *args, **kwargs)
            return made(*args, **kwargs)

        for owner in owners:
            self.set(owner, name, public)

    def item(self, table: dict[Any, Any], key: object, value: object) -> None:
        """Replace or add an entry in a dict."""
        before = table.get(key, _MISSING)
        table[key] = value
        if before is _MISSING:
            self.callback(table.pop, key)
        else:
            self.callback(table.__setitem__, key, before)

    def append(self, items: list[Any], value: object) -> None:
        """Append to a list to which other code may append, too."""
        items.append(value)
        self.callback(items.remove, value)

    def add(self, items: MutableSet[Any], value: object) -> None:
        """Add an item to a set."""
        items.add(value)
        self.callback(items.discard, value)

    def library(self, namespace: str) -> torch.library.Library:
        """Return a library whose registrations are removed when the changes are undone."""
        library = torch.library.Library(namespace, "IMPL")
        self.callback(library._destroy)
        return library

    def when_imported(self, name: str, change: Callable[[ModuleType, "Changes"], None]) -> None:
        """Call ``change(module, changes)`` now, or as soon as the module has been imported.

        DTensor and FSDP take a second to import, and most programs never use them.
        """
        if name in sys.modules:
            change(sys.modules[name], self)
            return

        def then(module: ModuleType) -> None:
            with torch_releases.noting_missing(self.missing):
                change(module, self)
            torch_releases.report_missing(self.missing)

        finder = _Finder(name, then)
        sys.meta_path.insert(0, finder)
        self.callback(finder.remove)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder for one module that calls ``then`` once the module's code has run."""

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
            run = spec.loader.exec_module

            def run_and_then(module: ModuleType) -> None:
                run(module)
                self._then(module)

            spec.loader.exec_module = run_and_then  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
