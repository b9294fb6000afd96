"""Pairs stay together in a micro batch in every layout, and every step has the same number."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from isthmus.data.batching.batches import BatchSettings, BatchShard, PairBatches, balance
from isthmus.data.store.mixture import MixtureSet
from isthmus.data.store.sample_store import SampleStore, split
from isthmus.errors import DataError


def store(pairs: int = 11) -> SampleStore:
    rng = random.Random(0)
    lengths = [rng.randint(2, 9) for _ in range(2 * pairs)]
    samples = [([1000 + k] + [5] * (n - 1), [0] + [1] * (n - 1)) for k, n in enumerate(lengths)]
    return SampleStore.from_samples(samples, [k // 2 for k in range(2 * pairs)])


def make(s: SampleStore, **options: Any) -> PairBatches:
    settings: dict[str, Any] = {
        "seq_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "packing": True,
        **options,
    }
    shares = settings.pop("shares", ())
    shard = BatchShard(**{name: settings.pop(name) for name in ("dp_rank", "dp_size") if name in settings})
    return PairBatches(s, BatchSettings(**settings), shard, shares=shares)


def numbers(lines: list[Any]) -> list[int]:
    results = []
    for line in lines:
        samples = list(line.sample_ids)
        starts = [int(sample[0]) - 1000 for sample in line.input_ids.split(line.lengths)]
        assert starts[: len(samples)] == samples
        assert [k + 1 for k in samples[::2]] == samples[1::2] and not any(k % 2 for k in samples[::2])
        results += samples
    return results


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_every_layout_gets_the_same_pairs(packing: bool, micro: int, dp: int) -> None:
    s = store()
    full = make(s, packing=False)
    ranks = [make(s, packing=packing, micro_batch_size=micro, dp_rank=rank, dp_size=dp) for rank in range(dp)]
    assert full.steps_per_epoch == ranks[0].steps_per_epoch == 3
    for step in (0, 2, 5):
        expected = numbers(full.step(step))
        parts = [rank.step(step) for rank in ranks]
        assert len(expected) == 8 and {len(part) for part in parts} == {4 // (micro * dp)}
        assert sorted(k for part in parts for k in numbers(part)) == sorted(expected)
    evaluated = [k for rank in ranks for lines in rank.eval_batches() for k in numbers(lines)]
    assert sorted(evaluated) == list(range(22))


def test_packing_balances_batches() -> None:
    assert balance([9, 1, 8, 2, 7, 3], 3) == [[0, 1], [2, 3], [4, 5]]
    assert balance([5], 2) == [[0], []]


def test_batches_contain_reference_logps() -> None:
    batches = make(store(), micro_batch_size=2)
    assert all(line.reference_logps is None for line in batches.step(0))
    batches.reference = torch.arange(22).double() / 2
    for line in batches.step(1):
        assert line.reference_logps is not None
        assert line.reference_logps.tolist() == [k / 2 for k in line.sample_ids]


def test_sets_are_mixed_by_pairs() -> None:
    shares = (MixtureSet("a", 8, 1.0), MixtureSet("b", 14, 3.0))
    lines = [line for k in range(10) for line in make(store(), shares=shares).step(k)]
    consumed = numbers(lines)
    assert sum(number >= 8 for number in consumed) == 60 and len(consumed) == 80


def test_samples_must_be_pairs() -> None:
    s = store()
    training, (held_out,) = split(s, [0.3])
    assert [make(part).sequences_per_epoch for part in (training, held_out)] == [8, 3]
    for broken in (s.select(range(21)), s.select(range(1, 21))):
        with pytest.raises(DataError, match="not pairs of answers"):
            make(broken)
