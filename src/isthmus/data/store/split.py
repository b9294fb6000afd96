"""Deterministic validation and test splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.data.store.sample_store import SampleStore
from isthmus.errors import UsageError


def split(store: SampleStore, fractions: Sequence[float], *, seed: int = 0) -> tuple[SampleStore, list[SampleStore]]:
    """Split off one part per fraction of the groups: (the rest, parts), in store order.

    A group is one conversation or one window of text. Each part with a fraction above 0 gets at least one group, and
    the rest keeps at least one.
    """
    if min(fractions, default=0.0) < 0.0 or sum(fractions) >= 1.0:
        raise UsageError(f"fractions {list(fractions)} cannot be split off. Expected 0 or more, and a sum below 1.")
    groups, group_of = np.unique(store.groups, return_inverse=True)
    counts = [max(1, round(fraction * len(groups))) if fraction else 0 for fraction in fractions]
    if sum(counts) >= len(groups):
        raise UsageError(
            f"cannot split off {' and '.join(map(str, counts))} of {len(groups)} samples: at least one must be left to "
            "train on. Use more data, or set data.valid_fraction=0 and data.test_fraction=0."
        )
    # Raw bits of a counter-based generator, sorted: unlike numpy's shuffles they never change with its version.
    bits = np.random.Philox(key=np.array([seed % 2**64, 1 << 63], dtype=np.uint64)).random_raw(len(groups))
    drawn = np.argsort(bits, kind="stable")
    part_of = np.full(len(groups), -1)
    for part, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        part_of[drawn[end - count : end]] = part
    parts = part_of[group_of]
    return store.select(np.flatnonzero(parts < 0)), [
        store.select(np.flatnonzero(parts == part)) for part in range(len(counts))
    ]
