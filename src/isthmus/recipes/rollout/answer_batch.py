"""What a reward gets: the answers of a step with their prompts and the fields of their records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from isthmus.data.chat.message_normalization import Message
from isthmus.data.chat.rollout_records import PROMPT
from isthmus.errors import DataError, escaped


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of the run, with the names of transformers' ``TrainerState``."""

    global_step: int
    """Optimizer steps done."""
    max_steps: int
    """Optimizer steps of the run."""

    @property
    def epoch(self) -> float:
        """Share of the run that is done."""
        return self.global_step / max(self.max_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerBatch:
    """Answers, and for each of them the values of its prompt's record."""

    prompts: Sequence[str | list[Message]]
    texts: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, list[Any]]
    """Values of the answers by field; None where the record does not have it."""
    state: TrainerState
    logged_columns: dict[str, list[Any]] = field(default_factory=dict)
    logged_metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        records: Sequence[Mapping[str, Any]],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        state: TrainerState,
    ) -> AnswerBatch:
        """A batch from the record of each answer, whose field ``prompt`` is the prompt."""
        names = dict.fromkeys(name for record in records for name in record if name != PROMPT)
        columns = {name: [record.get(name) for record in records] for name in names}
        prompts = [record[PROMPT] for record in records]
        return cls(prompts=prompts, texts=texts, completion_ids=completion_ids, columns=columns, state=state)

    @property
    def completions(self) -> list[str | list[Message]]:
        """The answers as TRL gives them to functions: a message for a prompt of messages, else text."""
        pairs = zip(self.prompts, self.texts, strict=True)
        return [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}] for prompt, text in pairs]


class Reward(Protocol):
    """One reward of ``rollout.reward``."""

    setting: str
    """Its text in ``rollout.reward``."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if it reads a field that is not in ``columns``, the fields of all records."""

    def __call__(self, batch: AnswerBatch) -> Any:
        """A number for each answer, None where the reward does not apply; or a coroutine that returns them."""


def missing_column(setting: str, needed: str, columns: Collection[str], hint: str) -> DataError:
    """The error of a reward whose field no record has; ``hint`` is what to do."""
    present = escaped(", ".join(sorted(columns))) or "none"
    return DataError(
        f"rollout.reward {escaped(setting)} reads the field {needed}, which no record has. Their fields: {present}. "
        f"{hint}"
    )
