"""What generates the answers of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Answer, Decoding


class RolloutEngine(Protocol):
    """All methods are collectives: every rank calls them with the same arguments and gets the same results."""

    def update_weights(self, step: int) -> None:
        """Generate with the weights after ``step`` from now on."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        decoding: Decoding,
        check: Callable[[], None],
    ) -> list[Answer]:
        """Answers to prompts of token ids, with the log-probability of each token.

        Args:
            prompts: token ids.
            numbers: of the answers, which select their random tokens.
            decoding: how to choose tokens.
            check: called again and again; raises on all ranks if the generation has to end.
        """

    def close(self) -> None:
        """End what the engine has started."""


@dataclass(frozen=True, slots=True)
class NativeEngine:
    """The training processes generate with the weights that they train."""

    inference: Inference

    def update_weights(self, step: int) -> None:
        """The weights are those of training."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        decoding: Decoding,
        check: Callable[[], None],
    ) -> list[Answer]:
        return self.inference.answers(prompts, decoding, numbers, check)

    def close(self) -> None:
        """The training processes are not the engine's."""
