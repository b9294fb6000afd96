"""The part of the state of a run that is about rollouts; each checkpoint has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from isthmus.data.batching.rollout_batches import GeneratedAnswers
from isthmus.errors import DataError
from isthmus.files.atomic_write import atomic_file
from isthmus.files.input_files import check_uncompressed

_FILE = "rollout.npz"
_TOKENS, _LOGPS = ("prompts", "answers"), ("sampling_logps", "policy_logps", "old_logps", "reference_logps")
_LISTS = (*_TOKENS, *_LOGPS, "routed_experts")
_NEXT = "next."
"""Prefix of the names of the arrays of the next rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The same on every rank."""

    first_step: int
    """Steps done before the first update on it."""
    answers: GeneratedAnswers
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRollout:
    """A rollout of earlier weights whose answers are not generated yet."""

    step: int
    """Steps done by the weights that generate."""
    first_step: int
    """Steps done before the first update on it."""
    position: int
    """Position of its first prompt in the order of training."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    consumed: int
    """Prompts of the rollouts so far."""
    rollout: Rollout | None
    """On which updates are still to be made."""
    next_rollout: Rollout | None = None
    """The one after it, of weights that are gone."""
    planned: PlannedRollout | None = None
    """In place of ``next_rollout``; the checkpoint has the weights that generate."""

    def write(self, folder: Path) -> None:
        """Write a file into the folder of a checkpoint."""
        arrays: dict[str, Any] = {}
        header: dict[str, Any] = {"consumed": self.consumed}
        if self.rollout is not None:
            header |= _add(arrays, self.rollout)
        if self.next_rollout is not None:
            header["next"] = _add(arrays, self.next_rollout, _NEXT)
        if self.planned is not None:
            header["planned"] = asdict(self.planned)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        with atomic_file(folder / _FILE) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def read(cls, folder: Path) -> RolloutState:
        """Raises DataError if the folder of a checkpoint has no valid file."""
        path = folder / _FILE
        try:
            check_uncompressed(path)
            with np.load(path, allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                rollout = _read(arrays, header) if "first_step" in header else None
                next_rollout = _read(arrays, header["next"], _NEXT) if "next" in header else None
                planned = PlannedRollout(**header["planned"]) if "planned" in header else None
                return cls(header["consumed"], rollout, next_rollout, planned)
        except (OSError, ValueError, LookupError, TypeError, EOFError, MemoryError, BadZipFile) as error:
            raise DataError(
                f"{path}: cannot be read, so the run cannot continue with the same prompts and answers ({error}). "
                "Resume from another checkpoint, or start a new run with --out."
            ) from error


def _add(arrays: dict[str, Any], rollout: Rollout, prefix: str = "") -> dict[str, Any]:
    """Add the arrays of a rollout; returns its other values."""
    answers = rollout.answers
    for name in _LISTS:
        if (values := getattr(answers, name)) is not None:
            arrays[f"{prefix}{name}"] = np.concatenate([np.asarray(value) for value in values])
            arrays[f"{prefix}{name}_lengths"] = np.array([len(value) for value in values])
    arrays[f"{prefix}advantages"], arrays[f"{prefix}weights"] = answers.advantages, answers.weights
    # Without times, so that equal runs have equal checkpoints.
    metrics = {name: value for name, value in rollout.metrics.items() if not name.endswith("_s")}
    return {"first_step": rollout.first_step, "metrics": metrics}


def _read(arrays: Mapping[str, Any], header: Mapping[str, Any], prefix: str = "") -> Rollout:
    lists: dict[str, Any] = {
        name: np.split(arrays[f"{prefix}{name}"], np.cumsum(arrays[f"{prefix}{name}_lengths"])[:-1])
        for name in _LISTS
        if f"{prefix}{name}" in arrays
    }
    lists |= {name: [tokens.tolist() for tokens in lists[name]] for name in _TOKENS}
    advantages, weights = arrays[f"{prefix}advantages"], arrays[f"{prefix}weights"]
    answers = GeneratedAnswers(**lists, advantages=advantages, weights=weights)
    return Rollout(first_step=header["first_step"], answers=answers, metrics=header["metrics"])
