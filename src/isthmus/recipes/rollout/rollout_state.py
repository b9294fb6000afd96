"""The part of the state of a run that is about rollouts; each checkpoint has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from isthmus.data.batching.rollout_batches import GeneratedAnswers
from isthmus.errors import DataError
from isthmus.files.atomic_write import atomic_file

_FILE = "rollout.npz"
_TOKENS, _LOGPS = ("prompts", "answers"), ("sampling_logps", "old_logps", "reference_logps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The same on every rank."""

    first_step: int
    """Steps done before the first update on it."""
    answers: GeneratedAnswers
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolloutState:
    consumed: int
    """Prompts of the rollouts so far."""
    rollout: Rollout | None
    """On which updates are still to be made."""

    def write(self, folder: Path) -> None:
        """Write a file into the folder of a checkpoint."""
        arrays: dict[str, Any] = {}
        header: dict[str, Any] = {"consumed": self.consumed}
        if self.rollout is not None:
            # Without times, so that equal runs have equal checkpoints.
            metrics = {name: value for name, value in self.rollout.metrics.items() if not name.endswith("_s")}
            header |= {"first_step": self.rollout.first_step, "metrics": metrics}
            answers = self.rollout.answers
            for name in (*_TOKENS, *_LOGPS):
                if (values := getattr(answers, name)) is not None:
                    arrays[name] = np.concatenate([np.asarray(value) for value in values])
                    arrays[f"{name}_lengths"] = np.array([len(value) for value in values])
            arrays |= {"advantages": answers.advantages, "weights": answers.weights}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        with atomic_file(folder / _FILE) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def read(cls, folder: Path) -> RolloutState:
        """Raises DataError if the folder of a checkpoint has no valid file."""
        path = folder / _FILE
        try:
            with np.load(path, allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                if "first_step" not in header:
                    return cls(header["consumed"], None)
                lists: dict[str, Any] = {
                    name: np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
                    for name in (*_TOKENS, *_LOGPS)
                    if name in arrays
                }
                lists |= {name: [tokens.tolist() for tokens in lists[name]] for name in _TOKENS}
                answers = GeneratedAnswers(**lists, advantages=arrays["advantages"], weights=arrays["weights"])
                rollout = Rollout(first_step=header["first_step"], answers=answers, metrics=header["metrics"])
                return cls(header["consumed"], rollout)
        except (OSError, ValueError, LookupError, TypeError, EOFError, BadZipFile) as error:
            raise DataError(
                f"{path}: cannot be read, so the run cannot continue with the same prompts and answers ({error}). "
                "Resume from another checkpoint, or start a new run with --out."
            ) from error
