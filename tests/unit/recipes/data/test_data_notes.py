"""Remarks of a run on positions, repeated samples and a single step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.store.mixture import MixtureSet
from isthmus.data.store.sample_store import SampleStore
from isthmus.families.architecture import from_settings
from isthmus.families.blocks.rotary import RopeScaling
from isthmus.recipes.data.corpus import Corpus
from isthmus.recipes.data.data_notes import (
    data_notes,
    epoch_count,
    epochs_text,
    model_positions,
    split_note,
)
from isthmus.recipes.data.default_batch import default_batch_size

SIZES = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "num_query_groups": 1}
MODEL = from_settings(
    {"family": "llama", "kv_channels": 8, "vocab_size": 8, "max_position_embeddings": 16, "norm_epsilon": 1e-6, **SIZES}
)


def notes(
    lengths: list[int],
    consumed: int,
    *,
    seq_length: int = 16,
    batch: int = 4,
    recipe: str = "sft",
    shares: Sequence[MixtureSet] = (),
    **train: Any,
) -> list[str]:
    sizes = {"global_batch_size": batch, "micro_batch_size": 1}
    data = {"files": ["f"], "seq_length": seq_length}
    config = RunConfig.model_validate(
        {"recipe": recipe, "out": "o", "model": {"path": "m"}, "data": data, "train": sizes | train}
    )
    store = SampleStore.from_samples([([1] * length, [1] * length) for length in lengths])
    batches = Batches(store, BatchSettings(seq_length=seq_length, packing=False, **sizes), shares=shares)
    return data_notes(config, MODEL, batches, consumed)


def test_samples_beyond_the_positions_are_counted():
    (note,) = notes([5, 17, 18, 30], 2, seq_length=32, steps=2)
    assert note.startswith("data.seq_length=32 is more than the 16 positions") and "2 of 4 samples are longer" in note
    assert notes([5, 17], 2, steps=2) == [] == notes([5, 17], 2, seq_length=32, steps=2)


@pytest.mark.parametrize(
    ("kind", "original", "positions"),
    [("linear", 8, 64), ("yarn", 8, 32), ("llama3", 4, 16), ("longrope", 2, 16), (None, 0, 16)],
)
def test_positions_of_scaled_rope(kind, original, positions):
    scaling = RopeScaling(kind=kind, factor=4.0, original_max_position_embeddings=original) if kind else None
    assert model_positions(MODEL.with_settings({"rope_scaling": scaling})) == positions


def test_repeated_sequences_are_counted():
    assert notes([5] * 80, 20, epochs=1) == []
    note, *_ = notes([5] * 10, 9, epochs=3)
    assert note.startswith("6 of 36 sequences are repeated: 9 steps of 4 take more than the 30 of train.epochs=3")
    assert notes([5] * 10, 9, steps=9) == []


def test_more_than_ten_epochs_of_fine_tuning_are_reported():
    (note,) = notes([5] * 60, 1000, batch=60, steps=1000)
    assert note.startswith("train.steps=1000 takes each sample 1,000 times, and more than 10 epochs of fine-tuning")
    assert notes([5] * 60, 10, batch=60, steps=10) == []
    note, *_ = notes([5] * 60, 11, batch=60, epochs=11)
    assert note.startswith("train.epochs=11 takes each sample 11 times")
    assert notes([5] * 60, 1000, batch=60, recipe="pretrain", steps=1000) == []


def test_the_most_repeated_set_is_reported():
    shares = [MixtureSet("many", 50, 1.0), MixtureSet("few", 10, 1.0)]
    (note,) = notes([5] * 60, 8, batch=30, shares=shares, steps=8)
    assert note.startswith("train.steps=8 takes each sample of data.sets.few 12 times")
    assert note.endswith("Lower its weight, or add data")


@pytest.mark.parametrize(("epochs", "text"), [(0.25, "0.25"), (12.34, "12.3"), (99.4, "99.4"), (1000, "1,000")])
def test_large_numbers_of_epochs_have_all_digits(epochs, text):
    assert epoch_count(epochs) == text


def config_of(recipe: str, data: dict[str, Any], **train: Any) -> RunConfig:
    data = {"files": ["f"], **data}
    return RunConfig.model_validate(
        {"recipe": recipe, "out": "o", "model": {"path": "m"}, "data": data, "train": train}
    )


def test_epochs_beyond_the_requested_ones_have_a_reason():
    config = config_of("sft", {}, epochs=1)
    assert epochs_text(config, 4.0) == "4 epochs (train.epochs=1, and the last step is filled up)"
    assert epochs_text(config, 1.0001) == "1 epoch"
    assert epochs_text(config_of("sft", {}, steps=9), 4.0) == "4 epochs"


def test_the_split_is_announced():
    samples = SampleStore.from_samples([([1, 2], [1, 1])] * 40)
    parts = samples.select(np.arange(2)), samples.select(np.arange(4))
    config = config_of("dpo", {"valid_fraction": 0.05, "test_files": ["t"]})
    first, valid, test = split_note(config, Corpus(samples, *parts)).split(", ")
    assert first == "data: 20 pairs to train on" and valid == "1 pair for validation (data.valid_fraction=0.05)"
    assert test == "2 pairs for test (data.test_files)"


def test_few_steps_are_reported():
    (note,) = notes([5] * 4, 1, epochs=1)
    assert note.startswith(
        "1 step HARDLY TRAINS the model: the data has 4 sequences and train.global_batch_size=4. Lower"
    )
    (note,) = notes([5] * 76, 19, epochs=1)
    assert note.startswith("19 steps HARDLY TRAIN the model")
    assert notes([5] * 80, 20, epochs=1) == [] == notes([5] * 76, 19, steps=19)


@pytest.mark.parametrize(
    ("settings", "sequences", "dp", "size"),
    [
        ({}, 320, 1, 16),
        ({}, 319, 1, 16),  # 20 steps, the last one reaches into the next epoch
        ({}, 304, 1, 8),
        ({}, 91, 1, 4),
        ({}, 6, 1, 1),  # 6 steps are too few, and no batch is smaller
        ({}, 6, 4, 4),
        ({"train": {"epochs": 3}}, 91, 1, 8),
        ({"train": {"micro_batch_size": 2}, "parallel": {"pp": 2, "vpp": 2}}, 6, 2, 8),
        ({"train": {"global_batch_size": 16}}, 6, 1, 16),
        ({"train": {"steps": 5}}, 6, 1, 16),
        ({"recipe": "kto"}, 6, 1, 16),  # the KL divergence is estimated from the batch
        ({"recipe": "kto", "kto": {"loss": "apo_zero_unpaired"}}, 6, 1, 1),
    ],
)
def test_the_default_batch_has_enough_steps(settings, sequences, dp, size):
    values = {"recipe": "sft", "out": "o", "model": {"path": "m"}, "data": {"files": ["f"]}} | settings
    assert default_batch_size(RunConfig.model_validate(values), sequences, dp) == size
