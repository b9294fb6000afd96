"""Queries of a packed sequence, and the keys that they attend to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from isthmus.engine.parallel.context_parallel import Spans


class Segment(NamedTuple):
    """Queries [start, end) of one sample, which attend to keys [first, end); positions in the packed sequence."""

    start: int
    end: int
    first: int


def segments(lengths: tuple[int, ...], window: int | None, spans: Spans | None) -> Iterator[list[Segment]]:
    """For each span of queries, its samples or parts of them. The keys of a span are adjacent rows."""
    ends = list(accumulate(lengths))
    for span_start, span_end in ((0, ends[-1]),) if spans is None else spans:
        sample_segments = []
        for length, sample_end in zip(lengths, ends, strict=True):
            sample = sample_end - length
            start, end = max(sample, span_start), min(sample_end, span_end)
            if start < end:
                sample_segments.append(
                    Segment(start, end, sample if window is None else max(sample, start - window + 1))
                )
        yield sample_segments


def offset_ranges(sizes: Iterable[int]) -> Spans:
    """Adjacent ranges of these sizes, from 0."""
    return tuple(pairwise(accumulate(sizes, initial=0)))
