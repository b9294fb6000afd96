"""Held-out parts of the samples, the same ones each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.data.store.sample_store import SampleStore
from isthmus.errors import UsageError


def split(store: SampleStore, fractions: Sequence[float], *, seed: int = 0) -> tuple[SampleStore, list[SampleStore]]:
    """Hold out a part for each of ``fractions``, of about so many of the groups: (the rest, parts), in store order.

    A group is one conversation or one window of text: no two samples of one conversation lie in two parts. At least
    one group comes into each part whose fraction is more than 0, and one stays.

    Raises:
        UsageError: a fraction is below 0, they are 1 or more together, or there are too few groups.
    """
    if min(fractions, default=0.0) < 0.0 or sum(fractions) >= 1.0:
        raise UsageError(f"shares of {list(fractions)} cannot be held out. Wanted 0 or more, and less than 1 in all.")
    groups, group_of = np.unique(store.groups, return_inverse=True)
    counts = [max(1, round(fraction * len(groups))) if fraction else 0 for fraction in fractions]
    if sum(counts) >= len(groups):
        raise UsageError(
            f"cannot hold out {' and '.join(map(str, counts))} of {len(groups)} samples: at least one must be left to "
            "learn from. Give more data, or set data.valid_fraction=0 and data.test_fraction=0."
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
