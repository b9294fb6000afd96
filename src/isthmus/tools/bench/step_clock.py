"""The callback that times the steps of a measured run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.train.callbacks import Callback

STEP_CLOCK = f"{__name__}:StepClock"
"""As in the setting ``callbacks``."""
STEPS_FILE = "bench_steps.json"


class StepClock(Callback):
    """Writes the rows of the steps with their end, ``end_s``, on the monotonic clock, to ``STEPS_FILE``.

    A step reads one result of the device, behind its forward and backward pass and before its update (see
    ``Stepper.train_step``). So the time between the ends of two steps is that of one whole step, the update of the
    step before included, although nothing else is synchronized.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._rows: list[dict[str, Any]] = []

    def begin(self, folder: Path, settings: Mapping[str, Any], *, step: int, total_steps: int) -> None:
        self._folder = folder

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._rows.append({**metrics, "end_s": time.monotonic()})

    def end(self, error: BaseException | None) -> None:
        if error is None:
            (self._folder / STEPS_FILE).write_text(json.dumps(self._rows), encoding="utf-8")
