"""Layout of packed samples for CPU attention: stacks of samples of similar length, cut into blocks of queries."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isthmus.engine.parallel.context_parallel import Spans

BLOCK_QUERIES = 96
"""Fastest of 64 to 256 in float32 and bfloat16."""
KEYS_MULTIPLE = 64
"""If a block does not start at its samples' first key, its number of keys is a multiple of this: oneDNN compiles a
kernel per shape (2 ms, 0.5 MiB)."""
ROWS_MULTIPLE = {torch.bfloat16: 32}
"""Stacked samples are padded to a multiple of this, for the same reason."""
MAX_STACKED = {torch.float32: 256}
"""Longer samples are not stacked: MKL is as fast without the copies."""
MAX_SCORES = 3 << 18
"""Scores of stacked samples at a time, so that they fit the cache."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class QueryRange:
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """A range of queries of several samples, and the keys that they attend to."""

    top: int
    bottom: int
    """Samples [top, bottom) of the stack."""
    start: int
    end: int
    """Queries [start, end) of each sample."""
    first: int
    last: int
    """Keys [first, last), from the start of the samples, or of the sequence for a range in place."""
    left: Tensor
    """Additive mask of the first keys (0 or -inf), [(end - start) * repeat, keys]."""
    right: Tensor
    """Mask of the last keys. Keys between the two masks are not masked."""


@dataclass(frozen=True, slots=True)
class SampleStack:
    """Samples of similar length as one batch, the longest first; or one range of queries in place."""

    ranges: tuple[QueryRange, ...]
    rows: int
    """Padded tokens per sample; 0 for a range in place."""
    blocks: tuple[QueryBlock, ...]

    def queries(self, sequence: Tensor, repeat: int) -> Tensor:
        """[G, T * repeat, D] -> [samples * G, rows * repeat, D]; a view for a range in place."""
        if not self.rows:
            (own,) = self.ranges
            return sequence[:, own.start * repeat : (own.start + own.length) * repeat]
        return self._stacked(sequence, repeat)

    def keys(self, sequence: Tensor) -> Tensor:
        """[G, T, D] -> [samples * G, rows, D]; the whole sequence for a range in place."""
        return self._stacked(sequence, 1) if self.rows else sequence

    def _stacked(self, sequence: Tensor, repeat: int) -> Tensor:
        groups, _, width = sequence.shape
        size = self.rows * repeat
        if sequence.size(1) == len(self.ranges) * size and all(one.length == self.rows for one in self.ranges):
            return sequence.unflatten(1, (-1, size)).transpose(0, 1).reshape(-1, size, width)
        stacked = sequence.new_zeros(len(self.ranges), groups, size, width)
        for target, one in zip(stacked, self.ranges, strict=True):
            rows = slice(one.start * repeat, (one.start + one.length) * repeat)
            target[:, : one.length * repeat] = sequence[:, rows]
        return stacked.flatten(0, 1)

    def unstack(self, stacked: Tensor, sequence: Tensor, repeat: int) -> None:
        """Copy ``stacked`` back into ``sequence``; a no-op for a range in place."""
        if self.rows:
            for one, rows in zip(self.ranges, stacked.unflatten(0, (len(self.ranges), -1)), strict=True):
                target = slice(one.start * repeat, (one.start + one.length) * repeat)
                sequence[:, target] = rows[:, : one.length * repeat]


@functools.lru_cache(maxsize=2)  # shared by the layers of a step, forward and backward
def plan_stacks(
    lengths: tuple[int, ...],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device = _CPU,
    spans: Spans | None = None,
) -> tuple[SampleStack, ...]:
    """Stack samples and cut the stacks into blocks of queries.

    ``window`` includes the query's own key. ``heads`` is (key heads, query heads per key head); ``spans`` are the
    queries' positions in the sequence, None: all.
    """
    cut = functools.partial(_cut, window=window, heads=heads, dtype=dtype, device=device)
    ends = torch.tensor(lengths).cumsum(0)
    positions = torch.arange(int(ends[-1]))
    sample_starts = (ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths))

    def in_place(start: int, end: int, offset: int) -> SampleStack:
        blocks = cut((end - start,), positions[start:end], sample_starts[start:end])
        return SampleStack((QueryRange(offset, end - start),), 0, blocks)

    if spans is not None:
        offsets = accumulate((end - start for start, end in spans), initial=0)
        return tuple(in_place(start, end, offset) for (start, end), offset in zip(spans, offsets, strict=False))
    multiple = ROWS_MULTIPLE.get(dtype, 1)
    waiting = [QueryRange(int(end) - length, length) for length, end in zip(lengths, ends, strict=True)]
    waiting.sort(key=lambda one: -one.length)
    stacks = []
    while waiting:
        longest = waiting[0].length
        similar = [one for one in waiting if 2 * one.length >= longest]
        if longest > MAX_STACKED.get(dtype, longest):
            similar = similar[:1]
        waiting = waiting[len(similar) :]
        if len(similar) == 1 and (longest % multiple == 0 or len(lengths) == 1):
            start = similar[0].start
            stacks.append(in_place(start, start + longest, start))
        else:
            rows = positions[: math.ceil(longest / multiple) * multiple]
            blocks = cut([one.length for one in similar], rows, torch.zeros_like(rows))
            stacks.append(SampleStack(tuple(similar), len(rows), blocks))
    return tuple(stacks)


def _cut(
    queries: Sequence[int],
    own: Tensor,
    sample_starts: Tensor,
    *,
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[QueryBlock, ...]:
    """Cut a stack into blocks; ``queries`` are the numbers of queries per sample, in descending order.

    For each query ``own`` is the key at its position and ``sample_starts`` the first key of its sample, both int64.
    """
    groups, repeat = heads
    oldest = sample_starts if window is None else torch.maximum(sample_starts, own - window + 1)
    blocks = []
    for start in range(0, len(own), BLOCK_QUERIES):
        end = min(start + BLOCK_QUERIES, len(own))
        last = int(own[end - 1]) + 1
        first = max(0, last - math.ceil((last - int(oldest[start])) / KEYS_MULTIPLE) * KEYS_MULTIPLE)
        unmasked = min(int(oldest[end - 1]), int(own[start])), int(own[start])  # all queries attend to keys between
        if unmasked[1] - unmasked[0] < (last - first) // 2:
            unmasked = last, last  # so few that one mask for all keys, added by the matmul itself, is faster
        masks = []
        for keys in (torch.arange(first, unmasked[0]), torch.arange(unmasked[1], last)):
            seen = (keys <= own[start:end, None]) & (keys >= oldest[start:end, None])
            values = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            masks.append(values.repeat_interleave(repeat, 0).to(device))
        number = sum(length > start for length in queries)
        at_once = max(1, MAX_SCORES // (groups * repeat * (end - start) * (last - first)))
        for top in range(0, number, at_once):
            blocks.append(QueryBlock(top, min(top + at_once, number), start, end, first, last, *masks))
    return tuple(blocks)
