"""Searches the candidates of an unknown decoder for a mapping that gives its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from isthmus.errors import IsthmusError, UsageError
from isthmus.families.inferred.json_family import read_family
from isthmus.hf.tiny_model import zero_tensors
from isthmus.tools.learn.candidates import Candidates, Choices
from isthmus.tools.learn.probe_model import TOLERANCE, ProbeModel, logits_difference

MAX_CANDIDATES = 500
Log = Callable[[str], None]


class CandidateSearch:
    """Depth-first search over the stages of the candidates."""

    def __init__(self, candidates: Candidates, probe: ProbeModel, scratch: Path, log: Log) -> None:
        self.candidates = candidates
        self._log = log
        self._probes = [
            ProbeModel.open(zero_tensors(probe.folder.path, candidates.is_zeroed(stage), scratch / f"stage-{number}"))
            if stage.zeroed
            else probe
            for number, stage in enumerate(candidates.stages)
        ]
        self.tried: int = 0
        self._nearest: dict[int, float] = {}
        self._errors: dict[int, str] = {}

    def run(self) -> tuple[Choices, float]:
        """The first candidate that agrees in every stage, and its difference; a UsageError if none does."""
        result = next(self._search(0, {}), None)
        if result is None:
            raise UsageError(self._failure())
        return result

    def _search(self, number: int, picks: Choices) -> Iterator[tuple[Choices, float]]:
        stage = self.candidates.stages[number]
        for option in stage.options(picks):
            if self.tried >= MAX_CANDIDATES:
                return
            candidate = {**picks, **option}
            difference = self._difference(candidate, number)
            self._nearest[number] = min(self._nearest.get(number, difference), difference)
            if not difference <= TOLERANCE:
                continue
            for line in self.candidates.describe(option):
                self._log(f"{stage.name}: {line}")
            self._log(f"{stage.name}: agrees to {difference:.1e} ({self.tried} candidates tried)")
            if number + 1 == len(self.candidates.stages):
                yield candidate, difference
            else:
                yield from self._search(number + 1, candidate)
                self._log(f"{stage.name}: no candidate of the next stage agrees, trying the next one")

    def _difference(self, picks: Choices, number: int) -> float:
        self.tried += 1
        try:
            return logits_difference(read_family(self.candidates.family_data(picks)), self._probes[number])
        except (IsthmusError, ValueError, AssertionError, RuntimeError) as error:
            self._errors[number] = str(error)
            return float("inf")

    def _failure(self) -> str:
        number = max(self._nearest)
        stage, nearest = self.candidates.stages[number].name, self._nearest[number]
        count = f"{self.tried} mappings{' (the maximum)' if self.tried >= MAX_CANDIDATES else ''}"
        if nearest == float("inf"):
            return f"none of {count} can be built in the {stage}: {self._errors[number]}"
        settings = self.candidates.settings
        keys = [key for key in (settings.activation, settings.epsilon) if key is not None]
        values = ", ".join(f"{key}={settings.effective[key]}" for key in keys)
        return (
            f"none of {count} gives its logits: in the {stage} the nearest is off by {nearest:.1e}, "
            f"{TOLERANCE:.0e} is allowed ({values}). The model has a feature that is not supported."
        )
