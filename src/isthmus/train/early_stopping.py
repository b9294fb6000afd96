"""The best validation loss of a run, and the end of a run that no longer improves."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.engine.checkpoint.run_state import BestLoss
from isthmus.train.reporter import Reporter


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    best: BestLoss
    patience: int | None
    """``train.early_stopping``: validations without a lower loss after which the run ends; None: no limit."""
    reporter: Reporter

    def stops(self, step: int) -> bool:
        """Whether to end the run after ``step``; reports it."""
        if self.patience is None or self.best.evaluations_since < self.patience:
            return False
        text = (
            f"stopped early: {self.best.evaluations_since} validations in a row were not below {self.best.loss:.4f}, "
            f"the loss of step {self.best.step} (train.early_stopping={self.patience})"
        )
        self.reporter.event(step, "early stop", text)
        return True
