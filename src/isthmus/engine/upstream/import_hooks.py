"""Patches of modules that are not imported yet, and modules that are provided when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]
Find = Callable[[Sequence[str]], ModuleSpec | None]
"""Finds a module in the folders of its package; None leaves it to Python."""


class _Finder:
    """The first finder of ``sys.meta_path``; it leaves other modules to the finders after it."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        self.modules: dict[str, Find] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self.modules:
            return self.modules[name](path or ())
        if name not in self.patches or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            for patch in self.patches[name]:
                patch(module)

        loader.exec_module = execute_and_patch
        return spec


_finder = _Finder()


def patch_on_import(name: str, patch: Patch) -> None:
    """Call ``patch(module)`` right after the module was executed, or now if it is imported already."""
    _install()
    _finder.patches.setdefault(name, []).append(patch)
    if name in sys.modules:
        patch(sys.modules[name])


def provide_on_import(name: str, find: Find) -> None:
    """Ask ``find`` first for this module."""
    _install()
    _finder.modules[name] = find


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
