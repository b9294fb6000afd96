"""Made-up samples are the same whoever asks for them, in whatever order."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.data.store.sample_store import MOCK_SAMPLES, MockSamples


def make(**options) -> MockSamples:
    return MockSamples(**{"seq_length": 64, "vocab_size": 1000, "seed": 3} | options)


def test_mock_sample_depends_on_seed_part_and_index():
    samples = make()
    tokens, mask = samples[41]
    assert tokens.dtype == np.int32 and len(tokens) == len(mask) == 65 and mask.all()
    assert tokens[:4].tolist() == PINNED  # other tokens would change resumed runs
    assert np.array_equal(make(count=50)[41][0], tokens)
    others = [samples[40], make(seed=4)[41], make(part="valid")[41], make(part="test")[41]]
    assert all(not np.array_equal(other, tokens) for other, _ in others)
    digests = [
        item.digest() for item in (make(), make(seed=4), make(part="test"), make(vocab_size=9), make(seq_length=9))
    ]
    assert len(set(digests)) == 5 and make(count=50).digest() == digests[0]


def test_mock_tokens_are_uniform():
    drawn = np.concatenate([make(vocab_size=10)[k][0] for k in range(200)])
    assert set(drawn.tolist()) == set(range(10))
    assert np.bincount(drawn).std() / np.bincount(drawn).mean() < 0.06
    assert int(make(vocab_size=2**31)[0][0].min()) >= 0


def test_mock_data_uses_no_memory():
    samples = make(seq_length=2**20)
    assert len(samples) == len(samples.lengths) == MOCK_SAMPLES and set(samples.lengths[:3].tolist()) == {2**20 + 1}
    assert samples.lengths.strides == (0,)
    with pytest.raises(IndexError):
        samples[MOCK_SAMPLES]


PINNED = [171, 142, 844, 631]
