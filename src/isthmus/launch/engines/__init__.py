"""Starting a run on many machines: what Slurm, Kubernetes, Ray and ssh need for it, rendered and submitted."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from isthmus.launch.engines.job import EngineName, Job


class Scheduler(Protocol):
    """The functions of each module of this package that is named like an engine."""

    def render(self, job: Job) -> str:
        """What is submitted, without secrets."""

    def submit(self, job: Job) -> int:
        """Submit it; returns 0, and raises an error otherwise."""


def engine_of(name: EngineName) -> Scheduler:
    """The module of an engine."""
    return cast(Scheduler, import_module(f"isthmus.launch.engines.{name}"))
