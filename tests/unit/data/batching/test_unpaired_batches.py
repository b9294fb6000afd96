"""Mismatched answers: each prompt with the answer of its neighbor, the same in every layout."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from isthmus.data.batching.batches import BatchSettings, BatchShard, UnpairedBatches
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.store.answer_views import AnswerEnd, MismatchedSamples, ScoredSamples, neighbors
from isthmus.data.store.sample_store import SampleStore


def store(count: int = 10) -> SampleStore:
    """Sample k has the prompt [100 + k] * 2 and the answer [200 + k] * (k + 1), and an odd one is desirable."""
    samples = [([100 + k] * 2 + [200 + k] * (k + 1), [0, 0] + [1] * (k + 1)) for k in range(count)]
    result = SampleStore.from_samples(samples)
    result.values = np.arange(count, dtype=np.float32) % 2
    return result


def make(**options: Any) -> UnpairedBatches:
    names = ("dp_rank", "dp_size")
    shard = BatchShard(**{name: options.pop(name) for name in names if name in options})
    settings = {"seq_length": 12, "micro_batch_size": 1, "global_batch_size": 4, "packing": True, "shuffle": False}
    return UnpairedBatches(store(), BatchSettings(**settings | options), shard)


def prompts_and_answers(batch: PackedBatch) -> list[tuple[int, int]]:
    """(prompt, answer) of each sample."""
    assert batch.labels is not None
    starts = np.cumsum([0, *batch.lengths])
    results = []
    for start, end in itertools.pairwise(starts):
        results.append((int(batch.input_ids[start]) - 100, int(batch.labels[end - 1]) - 200))
    return results[: len(batch.sample_lengths)]


def test_neighbors_are_cyclic_in_each_batch() -> None:
    order = np.array([3, 1, 0, 2, 4, 5])
    result = neighbors([order], np.arange(6), batch_size=4)
    assert {int(k): int(result[k]) for k in order} == {3: 2, 1: 3, 0: 1, 2: 0, 4: 5, 5: 4}
    # The last batch has one sample, and its answer is not its own.
    assert neighbors([np.arange(5)], np.arange(5), batch_size=4)[4] == 3
    # The two answers of a pair are not mismatched.
    assert neighbors([np.arange(4)], np.array([0, 0, 1, 1]), batch_size=4).tolist() == [3, 3, 1, 1]


def test_mismatched_samples_are_cut_and_differ_in_digest() -> None:
    answers = store()
    others = np.roll(np.arange(10), 1)
    mismatched = MismatchedSamples(answers, others, most=9)
    assert mismatched[1][0].tolist() == [101, 101, 200] and mismatched[1][1].tolist() == [0, 0, 1]
    assert len(mismatched[9][0]) == mismatched.lengths[9] == 9
    digests = {mismatched.digest(), MismatchedSamples(answers, others, most=8).digest(), answers.digest()}
    digests.add(MismatchedSamples(answers, np.roll(others, 1), most=9).digest())
    assert len(digests) == 4


@pytest.mark.parametrize("packing", [False, True])
def test_every_layout_has_the_same_mismatched_answers(packing: bool) -> None:
    def step(number: int, **options: Any) -> tuple[list[tuple[int, int]], list[tuple[int, float]]]:
        ranks = options.get("dp_size", 1)
        parts = [make(packing=packing, **options, dp_rank=rank).step(number) for rank in range(ranks)]
        batches = [batch for part in parts for batch in part]
        mismatched = [batch.mismatched for batch in batches if batch.mismatched is not None]
        assert [batch.sample_ids for batch in mismatched] == [batch.sample_ids for batch in batches]
        labels = [(k, value) for batch in batches for k, value in zip(batch.sample_ids, batch.values, strict=True)]
        return sorted(pair for batch in mismatched for pair in prompts_and_answers(batch)), sorted(labels)

    for number in range(3):
        pairs, labels = step(number)
        assert {prompt for prompt, _ in pairs} == {k for k, _ in labels}
        if number < 2:  # the third step begins the second epoch, with other neighbors
            assert {answer for _, answer in pairs} == {prompt for prompt, _ in pairs}
        assert all(prompt != answer for prompt, answer in pairs) and all(value == k % 2 for k, value in labels)
        for other in ({"micro_batch_size": 4}, {"dp_size": 2}, {"dp_size": 2, "micro_batch_size": 2}):
            assert step(number, **other) == (pairs, labels)


def test_scored_samples_read_the_last_token_that_is_not_padding() -> None:
    answers = store(3)  # the last sample is 102 102 202 202 202
    scored = ScoredSamples(answers, AnswerEnd(padding=None, after=(7, 8)), most=6)
    assert scored[0][0].tolist() == [100, 100, 200, 7, 8, 100] and scored[0][1].tolist() == [0, 0, 0, 0, 0, 1]
    assert scored[2][0].tolist() == [102, 102, 202, 202, 202, 7, 102] and scored.lengths.tolist() == [6, 7, 7]
    skipping = ScoredSamples(answers, AnswerEnd(padding=8, after=(7, 8)), most=6)
    assert skipping[0][1].tolist() == [0, 0, 0, 0, 1, 0] and skipping.digest() != scored.digest()
    only_padding = SampleStore.from_samples([([9, 9], [0, 1])])
    assert ScoredSamples(only_padding, AnswerEnd(padding=9), most=6)[0][1].tolist() == [0, 1, 0]
