"""What generates the answers of a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Answer, Decoding


class PendingAnswers(Protocol):
    """Answers that an engine generates."""

    def wait(self, check: Callable[[], None]) -> list[Answer]:
        """The answers, with the log-probability of each token; a collective.

        ``check`` is called again and again. It raises on all ranks if the generation has to end.
        """

    @property
    def seconds(self) -> float:
        """Time of the generation, after :meth:`wait`."""


class RolloutEngine(Protocol):
    """All methods are collectives: every rank calls them with the same arguments and gets the same results."""

    overlaps_training: ClassVar[bool]
    """Whether it generates while the training processes do something else."""

    def update_weights(self, step: int) -> None:
        """Generate with the weights after ``step`` from now on; no answers may be pending."""

    def start(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], decoding: Decoding) -> PendingAnswers:
        """Begin to answer prompts.

        Args:
            prompts: token ids.
            numbers: of the answers, which select their random tokens.
            decoding: how to choose tokens.
        """

    def close(self) -> None:
        """End what the engine has started."""


@dataclass(frozen=True, slots=True)
class NativeEngine:
    """The training processes generate with the weights that they train."""

    inference: Inference
    overlaps_training: ClassVar[bool] = False

    def update_weights(self, step: int) -> None:
        """The weights are those of training."""

    def start(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], decoding: Decoding) -> PendingAnswers:
        return _NativeAnswers(self.inference, prompts, numbers, decoding)

    def close(self) -> None:
        """The training processes are not the engine's."""


@dataclass(slots=True)
class _NativeAnswers:
    """Generates in :meth:`wait`, with the weights of that time."""

    inference: Inference
    prompts: Sequence[Sequence[int]]
    numbers: Sequence[int]
    decoding: Decoding
    seconds: float = 0.0

    def wait(self, check: Callable[[], None]) -> list[Answer]:
        started_s = time.monotonic()
        answers = self.inference.answers(self.prompts, self.decoding, self.numbers, check)
        self.seconds = time.monotonic() - started_s
        return answers
