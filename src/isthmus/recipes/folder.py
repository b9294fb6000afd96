"""The run folder: what may lie there before a run, and what the run finds of itself."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import MissingInput, NoSpace

CONFIG, METRICS, CHECKPOINTS, EXPORT, DATA = "config.yaml", "metrics.jsonl", "checkpoints", "hf", "data"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder: ``config.yaml``, ``metrics.jsonl``, ``tensorboard/``, ``data/``, ``checkpoints/``, ``hf/``."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / CONFIG

    @property
    def checkpoints(self) -> Path:
        return self.root / CHECKPOINTS

    @property
    def data(self) -> Path:
        return self.root / DATA

    def export(self, step: int | None = None) -> Path:
        """Where the Hugging Face model goes: ``hf``, or ``hf-step-0000100`` for one on the way."""
        return self.root / (EXPORT if step is None else f"{EXPORT}-step-{step:07d}")

    def checkpoint_to_resume(self, resume: str) -> Path | None:
        """The checkpoint that a run in this folder goes on from, None for a fresh start.

        Args:
            resume: ``auto`` takes the folder's newest, ``never`` none, anything else is the path of one.

        Raises:
            NoSpace: the folder holds something that this run must not touch.
            MissingInput: the named checkpoint is not there.
            DataError: the folder's tracker names a checkpoint that is not there.
        """
        from isthmus.engine.checkpoint import latest

        occupied = self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir()))
        if occupied and not self.config.is_file():
            raise NoSpace(
                f"{self.root} exists already and is not a run folder. Remove it or choose another folder with --out."
            )
        newest = latest(self.checkpoints) if occupied else None
        if newest is not None and resume == "never":
            raise NoSpace(
                f"{self.root} holds a run with checkpoints and checkpoint.resume is 'never'. Choose another folder "
                "with --out, or checkpoint.resume=auto to go on."
            )
        if resume in ("auto", "never"):
            return newest
        chosen = Path(resume)
        if not chosen.is_dir():
            raise MissingInput(f"checkpoint.resume={resume}: no such folder. Name an iter_NNNNNNN folder, or 'auto'.")
        if (chosen / ".metadata").is_file():
            return chosen
        below = latest(chosen)
        if below is None:
            raise MissingInput(f"checkpoint.resume={resume} holds no checkpoint. Name an iter_NNNNNNN folder.")
        return below

    def prepare(self, *, fresh: bool) -> None:
        """Make the folder; a fresh start clears what an earlier start of this run left without a checkpoint."""
        self.root.mkdir(parents=True, exist_ok=True)
        if fresh:
            (self.root / METRICS).unlink(missing_ok=True)
            shutil.rmtree(self.root / "tensorboard", ignore_errors=True)
