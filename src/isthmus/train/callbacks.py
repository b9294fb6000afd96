"""Callbacks: the user's own code at the events of a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import MissingInput, UsageError


class Callback:
    """Base class of callbacks; override the events that you need.

    A callback is created without arguments, on the main rank only, and called between steps: it delays the run for as
    long as it takes. An exception ends the run on all ranks, like an error of the run itself.
    """

    def begin(self, folder: Path, settings: Mapping[str, Any], *, step: int, total_steps: int) -> None:
        """Before the first step of this process.

        Args:
            folder: the run folder.
            settings: all settings by dotted name, such as ``optim.lr``.
            step: steps done before, by the run that is resumed.
            total_steps: the last step.
        """

    def step(self, metrics: Mapping[str, Any]) -> None:
        """After each step; ``metrics`` is the row of ``metrics.jsonl``, with ``step`` counted from 1."""

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """After a validation or test; ``metrics`` is the row of ``metrics.jsonl``, such as ``step``, ``valid_loss``."""

    def event(self, row: Mapping[str, Any]) -> None:
        """When something happened; ``row`` is that of ``events.jsonl``, with ``step``, ``event`` and ``text``."""

    def save(self, step: int, checkpoint: Path | str) -> None:
        """After a checkpoint is complete, which is a URL if it is in ``checkpoint.store``."""

    def export(self, step: int, model: Path) -> None:
        """After a Hugging Face folder is complete."""

    def end(self, error: BaseException | None) -> None:
        """At the end; ``error`` is the reason if the run fails or is stopped by a signal (``errors.Preempted``)."""


class Callbacks:
    """Calls the events of all callbacks, in the order of the setting."""

    def __init__(self, names: Sequence[str]) -> None:
        """Create them; raises UsageError if one cannot be created, and the errors of :func:`callback_class`."""
        self._all: dict[str, Callback] = {}
        for name in names:
            kind = callback_class(name)
            try:
                self._all[name] = kind()
            except Exception as error:
                raise UsageError(f"callbacks: {name}() failed: {type(error).__name__}: {error}. Correct it.") from error

    def call(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call ``event`` of each callback; raises UsageError if one fails."""
        for name, callback in self._all.items():
            try:
                getattr(callback, event)(*args, **kwargs)
            except Exception as error:
                raise UsageError(
                    f"callbacks: {name} failed in {event}: {type(error).__name__}: {error}. Correct it, or leave it "
                    "out; --debug shows where."
                ) from error


def callback_class(name: str) -> type[Callback]:
    """The class of ``module:Class``; the module may be in the current folder.

    Raises:
        MissingInput: there is no such module or class.
        UsageError: it is no callback.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise UsageError(f"callbacks: got {name!r}, expected module:Class, such as my_callbacks:Alert.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as for python -m
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise MissingInput(
            f"callbacks: {name} cannot be imported: {error}. Give module:Class of a module in the current folder or on "
            "PYTHONPATH."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise UsageError(f"callbacks: {name} is not a subclass of isthmus.Callback. Derive it from that class.")
    return kind
