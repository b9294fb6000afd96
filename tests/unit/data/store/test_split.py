"""Held-out parts are whole records, apart from each other, and the same each time."""

from __future__ import annotations

import pytest

from isthmus.data.store.sample_store import SampleStore, split
from isthmus.errors import UsageError


def test_split_is_deterministic_and_keeps_groups():
    groups = [k // 3 for k in range(60)]
    store = SampleStore.from_samples([([k, k + 1], [0, 1]) for k in range(60)], groups)
    train, (valid, test, none) = split(store, [0.1, 0.2, 0.0])
    assert (len(train), len(valid), len(test), len(none)) == (42, 6, 12, 0)
    owned = [set(part.groups.tolist()) for part in (train, valid, test)]
    assert sum(map(len, owned)) == len(set.union(*owned)) == 20
    assert sorted(int(part[k][0][0]) for part in (train, valid, test) for k in range(len(part))) == list(range(60))
    assert all(part.sources[0].tokens is store.sources[0].tokens for part in (train, valid, test))
    assert split(store, [0.1])[1][0].digest() == valid.digest()  # a test split does not change the validation split
    assert split(store, [0.1], seed=1)[1][0].digest() != valid.digest()
    assert len(split(store, [0.001])[1][0]) == 3
    for bad in ([0.98], [0.5, 0.5], [-0.1]):
        with pytest.raises(UsageError):
            split(store, bad)
