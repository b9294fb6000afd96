"""What layers keep of the tokens of a sequence, so that generation computes only its new tokens.

Sequences have slots, the rows of the tensors of all layers. The active ones have the first slots: a step of all of them
reads and writes views, without copies. A forward pass is a prefill of new sequences, or a step of one token for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """The states of the sequences of a rank, in its layers."""

    slots: int
    capacity: int
    """Most tokens of a sequence."""
    _tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """[slots, ...] by layer and name, created by the first forward pass."""
    _weights: dict[int, Tensor] = field(default_factory=dict)

    def tensor(self, layer: int, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor [slots, *shape] with the dtype and device of ``like``; initially zero."""
        key = layer, name
        if key not in self._tensors:
            self._tensors[key] = like.new_zeros(self.slots, *shape)
        return self._tensors[key]

    def weight(self, layer: int, compute: Callable[[], Tensor]) -> Tensor:
        """What a layer computes of its weights once, since they do not change while there are states."""
        if layer not in self._weights:
            self._weights[layer] = compute()
        return self._weights[layer]

    def copy(self, source: int, target: int) -> None:
        """Copy a sequence to a free slot."""
        for tensor in self._tensors.values():
            tensor[target] = tensor[source]

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for tensor in self._tensors.values())


@dataclass(frozen=True, slots=True)
class BatchStates:
    """The states of the sequences of a packed batch, which continue in it."""

    states: SequenceStates
    first: int
    """Slot of the first sample of a prefill. Row t of a step has slot t; rows of padding have free slots."""
    sequences: int
    """Samples without padding."""
    is_prefill: bool
    """The samples are new sequences; otherwise each has one token."""
    longest: int
    """Tokens of the longest sequence, with those of this batch."""
    _shared: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """What layers of the same windows share in a step."""

    def seen_columns(self, positions: Tensor, columns: int, chunk: int | None) -> Tensor:
        """Whether the token at each of ``positions`` [n] sees each of its cached keys, [n, 1, 1, columns]."""

        def compute() -> Tensor:
            last = positions if chunk is None else positions % chunk
            return (torch.arange(columns, device=positions.device) <= last[:, None])[:, None, None]

        return self.shared(("seen", columns, chunk), compute)

    def mask(self, positions: Tensor, columns: int, chunk: int | None, groups: int) -> Tensor:
        """:meth:`seen_columns` as a mask to add, 0 or -inf, float32 [n * groups, 1, columns]."""

        def compute() -> Tensor:
            seen = self.seen_columns(positions, columns, chunk).expand(-1, groups, -1, -1).flatten(0, 1)
            return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)

        return self.shared(("mask", columns, chunk, groups), compute)

    def new_rows(self, positions: Tensor, groups: int, capacity: int) -> Tensor:
        """Rows [n * groups] of a cache [slots * groups * capacity, D] of the tokens at ``positions`` [n]."""

        def compute() -> Tensor:
            heads = torch.arange(len(positions) * groups, device=positions.device).view(-1, groups)
            return (heads * capacity + (positions % capacity)[:, None]).flatten()

        return self.shared(("rows", groups, capacity), compute)

    def shared(self, key: tuple[Any, ...], compute: Callable[[], _Value]) -> _Value:
        """What layers compute once in a step; the key has all that the result depends on besides the batch."""
        if key not in self._shared:
            self._shared[key] = compute()
        value: _Value = self._shared[key]
        return value


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The recurrent states of a layer."""

    batch: BatchStates
    layer: int
    lengths: tuple[int, ...]
    """Tokens of each sample of the batch; padding is the last one."""

    @property
    def is_prefill(self) -> bool:
        return self.batch.is_prefill

    def keep_last(self, name: str, x: Tensor, count: int) -> None:
        """Keep the last ``count`` rows of each sample of ``x`` [T, C], after zeros if it has fewer."""
        tails = self._new(name, (count, x.size(-1)), x)
        tails.zero_()
        for tail, sample in zip(tails, x.split(self.lengths), strict=False):
            rows = sample[-count:]
            tail[count - len(rows) :] = rows

    def shifted(self, name: str, x: Tensor, count: int) -> Tensor:
        """The last ``count`` rows of each sequence and its new one, [T, count + 1, C], of ``x`` [T, C]."""
        tails = self._current(name, (count, x.size(-1)), x)
        rows = torch.cat((tails, x[:, None]), dim=1)
        tails.copy_(rows[:, 1:])
        return rows

    def scan(
        self,
        name: str,
        sample: Callable[..., tuple[Tensor, Tensor]],
        step: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        **constants: Tensor,
    ) -> Tensor:
        """The outputs of a recurrence for ``inputs`` [T, ...].

        Args:
            name: of the state.
            sample: outputs of one sample, and the state after it.
            step: outputs of one token for each sequence; the last argument is their states, which it updates.
            inputs: arguments of both.
            constants: further arguments of both, that are not of tokens.
        """
        if not self.is_prefill:
            return step(*inputs, self._current(name, (), inputs[0]), **constants)
        samples = zip(*(x.split(self.lengths) for x in inputs), strict=True)
        outputs, states = zip(*(sample(*parts, **constants) for parts in samples), strict=True)
        for row, state in zip(self._new(name, states[0].shape, states[0]), states, strict=False):
            row.copy_(state)
        return torch.cat(outputs)

    def _new(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        start = self.batch.first
        return self.batch.states.tensor(self.layer, name, shape, like)[start : start + self.batch.sequences]

    def _current(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.batch.states.tensor(self.layer, name, shape, like)[: len(like)]
