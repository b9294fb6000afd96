"""A held-out part of the samples, the same one each time."""

from __future__ import annotations

import numpy as np

from isthmus.data.store import SampleStore
from isthmus.errors import UsageError


def split_validation(
    store: SampleStore, *, fraction: float | None = None, count: int | None = None, seed: int = 0
) -> tuple[SampleStore, SampleStore]:
    """Hold out about ``fraction`` of the groups, or ``count`` of them: (training, validation), both in store order.

    A group is one conversation or one window of text: no two samples of one conversation lie on both sides. At least
    one group stays on each side.

    Raises:
        UsageError: not exactly one of ``fraction`` and ``count``, or one that leaves a side empty.
    """
    if (fraction is None) == (count is None):
        raise UsageError("split_validation wants one of fraction and count.")
    groups = np.unique(store.groups)
    if fraction is not None:
        if not 0.0 < fraction < 1.0:
            raise UsageError(f"data.valid_fraction={fraction}. Wanted more than 0 and less than 1.")
        count = max(1, round(fraction * len(groups)))
    assert count is not None
    if not 0 < count < len(groups):
        raise UsageError(
            f"cannot hold out {count} of {len(groups)} samples for validation: both sides need at least one. "
            "Give more data, or set data.valid_fraction=0."
        )
    bits = np.random.Philox(key=np.array([seed % 2**64, 1 << 63], dtype=np.uint64)).random_raw(len(groups))
    held = np.isin(store.groups, groups[np.argsort(bits, kind="stable")[:count]])
    return store.select(np.flatnonzero(~held)), store.select(np.flatnonzero(held))
