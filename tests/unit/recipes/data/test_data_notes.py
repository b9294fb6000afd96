"""Remarks of a run on positions, repeated samples and a single step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.store.sample_store import SampleStore
from isthmus.families.architecture import Architecture, RopeScaling
from isthmus.recipes.data.data_notes import data_notes, model_positions

SIZES = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "num_query_groups": 1}
MODEL = Architecture(
    family="llama", kv_channels=8, vocab_size=8, max_position_embeddings=16, norm_epsilon=1e-6, **SIZES
)


def notes(lengths: list[int], taken: int, *, seq_length: int = 16, batch: int = 4, **train: Any) -> list[str]:
    sizes = {"global_batch_size": batch, "micro_batch_size": 1}
    given = {"files": ["f"], "seq_length": seq_length}
    config = RunConfig.model_validate(
        {"recipe": "sft", "out": "o", "model": {"path": "m"}, "data": given, "train": sizes | train}
    )
    store = SampleStore.from_samples([([1] * length, [1] * length) for length in lengths])
    batches = Batches(store, BatchSettings(seq_length=seq_length, packing=False, **sizes))
    return data_notes(config, MODEL, batches, taken)


def test_samples_beyond_the_positions_are_counted():
    (note,) = notes([5, 17, 18, 30], 2, seq_length=32, steps=2)
    assert note.startswith("data.seq_length=32 is more than the 16 positions") and "2 of 4 samples are longer" in note
    assert notes([5, 17], 2, steps=2) == []


@pytest.mark.parametrize(
    ("kind", "original", "positions"),
    [("linear", 8, 64), ("yarn", 8, 32), ("llama3", 4, 16), ("longrope", 2, 16), (None, 0, 16)],
)
def test_positions_of_scaled_rope(kind, original, positions):
    scaling = RopeScaling(kind=kind, factor=4.0, original_max_position_embeddings=original) if kind else None
    assert model_positions(replace(MODEL, rope_scaling=scaling)) == positions


def test_repeated_sequences_are_counted():
    assert notes([5] * 8, 2, epochs=1) == []
    (note,) = notes([5] * 10, 9, epochs=3)
    assert note.startswith("6 of 36 sequences are repeated: 9 steps of 4 take more than the 30 of train.epochs=3")
    assert notes([5] * 10, 9, steps=9) == []


def test_one_step_is_reported():
    (note,) = notes([5] * 4, 1, epochs=1)
    assert note.startswith("this run has one step, with 4 sequences of training data and train.global_batch_size=4")
