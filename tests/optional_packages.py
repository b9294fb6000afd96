"""Packages that only some tests need: a process that runs none of these does not import them, which takes seconds."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from packaging.version import Version


class OptionalPackage:
    """A package that is imported on first use; tests with the marker ``required`` are skipped without it."""

    def __init__(self, name: str, minimum: str, *, extra: str) -> None:
        self._name = name
        reason = f"{name} {minimum} or newer is not installed (extra: {extra})"
        self.required = pytest.mark.skipif(not _is_installed(name, minimum), reason=reason)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks every global of a module whether it is a fixture
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def _is_installed(name: str, minimum: str) -> bool:
    try:
        return Version(version(name)) >= Version(minimum)
    except PackageNotFoundError:
        return False


bitsandbytes = OptionalPackage("bitsandbytes", "0.49", extra="lora")
datasets = OptionalPackage("datasets", "3", extra="data")
peft = OptionalPackage("peft", "0.21", extra="bench")
trl = OptionalPackage("trl", "1.0", extra="bench")
trl_with_rollouts = OptionalPackage("trl", "1.16", extra="bench")
