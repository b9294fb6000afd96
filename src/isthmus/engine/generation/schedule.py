"""Continuous batching: which sequences each data-parallel rank continues in a forward pass.

A pass is a prefill of waiting prompts where a rank has free slots, or else a step of one token for each sequence. Every
rank has the same schedule, so all of them run the same number of passes. All tokens but the last of equal prompts, one
after the other, are computed once: the other sequences get a copy of the states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from isthmus.data.batching.rollout_batches import RoutedExperts


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to continue a prompt."""

    max_new_tokens: int
    ends: Collection[int] = ()
    """Tokens that end an answer; it includes them."""
    temperature: float = 0.0
    """0: always the most probable token."""
    seed: int = 0
    is_complete: Callable[[Sequence[int]], bool] = lambda answer: False
    """Whether an answer ends after these tokens."""
    top_p: float = 1.0
    """Tokens are drawn from the most probable ones that have this probability together, at the temperature."""


@dataclass(slots=True)
class Answer:
    """The tokens that continue a prompt."""

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    """Log-probability of each token, at the temperature of the decoding (1 if it is 0) and of all tokens: ``top_p``
    does not change it."""
    routed_experts: RoutedExperts | None = None
    """Experts that a server chose for the tokens of prompt and answer but the last; None: they are not known."""


@dataclass(frozen=True, slots=True)
class RankInputs:
    """The new tokens of the sequences of a data-parallel rank in a forward pass; empty if it has none."""

    tokens: tuple[tuple[int, ...], ...] = ()
    """The new tokens of each sequence: a prompt, or one token."""
    past: tuple[int, ...] = ()
    """Tokens before these."""
    numbers: tuple[int, ...] = ()
    """Numbers of the prompts, for random tokens."""
    first: int = 0
    """Slot of the first sequence."""
    copies: tuple[tuple[int, int], ...] = ()
    """Slots of sequences to copy before the pass, and where to."""

    @property
    def is_prefill(self) -> bool:
        return any(length == 0 for length in self.past)


class Schedule:
    """Continues prompts until all answers are complete."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], continues: Callable[[int, Answer], bool], *, numbers: Sequence[int]
    ) -> None:
        """``continues``: whether a prompt, by its index, gets a token after those of its answer."""
        self.prompts = prompts
        self.numbers = numbers
        self._continues = continues
        self.answers: list[Answer] = [Answer() for _ in prompts]
        self._waiting = deque(index for index in range(len(prompts)) if continues(index, self.answers[index]))
        self._active: list[list[int]] = []
        self._copies: list[list[tuple[int, int]]] = []
        self._inputs: list[list[int | None]] = []
        """Prompts of each rank in the last pass; None for one whose first token comes from a step."""

    def start(self, ranks: int, slots: int, batch_tokens: int) -> None:
        """Set the data-parallel ranks, the slots of each, and the most tokens of a prefill of several prompts."""
        self._slots, self._batch_tokens = slots, batch_tokens
        self._active, self._copies = [[] for _ in range(ranks)], [[] for _ in range(ranks)]

    def next_pass(self) -> list[RankInputs]:
        """The inputs of each rank; empty if all answers are complete."""
        new = self._admit()
        if any(new):
            self._inputs = [[None if len(group) > 1 else group[0] for group in groups] for groups in new]
            return [self._prefill(rank, groups) for rank, groups in enumerate(new)]
        self._inputs = [list(indices) for indices in self._active]
        return [self._step(rank, indices) for rank, indices in enumerate(self._active)] if any(self._active) else []

    def next_sequences(self) -> list[int]:
        """All prompts of the first rank whose answers are not complete."""
        self._active[0] += self._waiting
        self._waiting.clear()
        self._inputs = [list(self._active[0])]
        return list(self._active[0])

    def add(self, results: Sequence[Sequence[tuple[float, int]]]) -> None:
        """Add loss and token of each sequence of the last pass, by rank."""
        for rank, (indices, tokens) in enumerate(zip(self._inputs, results, strict=True)):
            for index, (loss, token) in zip(indices, tokens, strict=True):
                if index is not None:
                    self.answers[index].tokens.append(token)
                    self.answers[index].logps.append(-loss)
            self._free_slots(rank)

    def _admit(self) -> list[list[list[int]]]:
        """Give groups of equal prompts that wait to the ranks with the fewest sequences."""
        new: list[list[list[int]]] = [[] for _ in self._active]
        tokens, sizes = [0] * len(new), [len(active) for active in self._active]
        while self._waiting:
            prompt = self.prompts[self._waiting[0]]
            fitting = [
                rank for rank in range(len(new)) if not new[rank] or tokens[rank] + len(prompt) <= self._batch_tokens
            ]
            rank = min(fitting, key=sizes.__getitem__, default=None)
            if rank is None or sizes[rank] == self._slots:
                break
            group = [self._waiting.popleft()]
            free = self._slots - sizes[rank] if len(prompt) > 1 else 1
            while self._waiting and len(group) < free and self.prompts[self._waiting[0]] == prompt:
                group.append(self._waiting.popleft())
            new[rank].append(group)
            tokens[rank] += len(prompt)
            sizes[rank] += len(group)
        return new

    def _prefill(self, rank: int, groups: list[list[int]]) -> RankInputs:
        active = self._active[rank]
        first = len(active)
        active += [group[0] for group in groups]
        tokens = tuple(tuple(self.prompts[group[0]][: -1 if len(group) > 1 else None]) for group in groups)
        inputs = self._rank_inputs(rank, active[first:], tokens, tuple(0 for _ in groups), first)
        for slot, (_, *others) in enumerate(groups, start=first):
            self._copies[rank] += [(slot, len(active) + k) for k in range(len(others))]
            active += others
        return inputs

    def _step(self, rank: int, indices: list[int]) -> RankInputs:
        tokens = tuple(((self.answers[index].tokens or self.prompts[index])[-1],) for index in indices)
        past = tuple(len(self.prompts[index]) + len(self.answers[index].tokens) - 1 for index in indices)
        return self._rank_inputs(rank, indices, tokens, past, 0)

    def _rank_inputs(
        self, rank: int, indices: list[int], tokens: tuple[tuple[int, ...], ...], past: tuple[int, ...], first: int
    ) -> RankInputs:
        copies, self._copies[rank] = tuple(self._copies[rank]), []
        return RankInputs(tokens, past, tuple(self.numbers[index] for index in indices), first, copies)

    def _free_slots(self, rank: int) -> None:
        """Remove complete sequences; the last one takes the slot of each."""
        active = self._active[rank]
        for slot in reversed(range(len(active))):
            index = active[slot]
            if self._continues(index, self.answers[index]):
                continue
            last = active.pop()
            if slot < len(active):
                active[slot] = last
                self._copies[rank].append((len(active), slot))
