"""Questions about the standard library: training and validation split, and scoring."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from isthmus.tools.demo.python_docs import DocEntry, stable_hash

_VALIDATION_ONE_IN = 10
_METHOD_QUESTIONS_ONE_IN = 3
"""Share of the methods with a "kind" question; most entries are methods."""


@dataclass(frozen=True, slots=True)
class Question:
    topic: str
    text: str
    answer: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def split_entries(entries: Sequence[DocEntry]) -> tuple[list[DocEntry], list[DocEntry]]:
    """Split into training and validation entries; no training entry mentions a validation name."""
    validation = [entry for entry in entries if stable_hash(entry.unit) % _VALIDATION_ONE_IN == 0]
    names = {entry.name for entry in validation}
    return [entry for entry in entries if not mentions(entry.document, names)], validation


def mentions(text: str, names: Collection[str]) -> bool:
    """Whether the text contains one of the dotted names, or an attribute of it."""
    for name in re.findall(r"\w+(?:\.\w+)+", text):
        parts = name.split(".")
        if any(".".join(parts[:end]) in names for end in range(2, len(parts) + 1)):
            return True
    return False


def make_questions(entries: Iterable[DocEntry]) -> list[Question]:
    """Up to three questions per entry: its kind, its module and its number of parameters."""
    questions: list[Question] = []
    for entry in entries:
        number = stable_hash(entry.unit + entry.name)
        if entry.kind != "method" or number % _METHOD_QUESTIONS_ONE_IN == 0:
            questions.append(Question("kind", f"What kind of object is {entry.reference}?", entry.kind))
        if number % 5 < 3:
            text = f"Which module defines {entry.reference}?"
            questions.append(Question("module", text, f"It is defined in {entry.module}."))
        if entry.parameters and number % 3 < 2:
            text = f"How many parameters has {entry.name}({', '.join(entry.parameters)})?"
            questions.append(Question("parameters", text, str(len(entry.parameters))))
    return questions


def exact_match(questions: Sequence[Question], answers: Sequence[str]) -> float:
    """Fraction of exactly correct answers, 0..1."""
    pairs = zip(questions, answers, strict=True)
    return sum(question.answer == answer.strip() for question, answer in pairs) / len(questions)


def chance_level(questions: Sequence[Question], training: Sequence[Question]) -> float:
    """Exact match of the topic's most frequent training answer."""
    counts: dict[str, Counter[str]] = {}
    for question in training:
        counts.setdefault(question.topic, Counter())[question.answer] += 1
    return exact_match(questions, [counts[question.topic].most_common(1)[0][0] for question in questions])
