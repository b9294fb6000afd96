"""Remarks on the samples of a run for its log: positions that the model has not learned, repeated samples, epochs."""

from __future__ import annotations

import math

import numpy as np

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches
from isthmus.errors import counted
from isthmus.families.architecture import Architecture
from isthmus.recipes.data.corpus import Corpus
from isthmus.recipes.data.default_batch import ENOUGH_STEPS
from isthmus.recipes.registry import recipe_of

_MOST_EPOCHS = 10
"""Most epochs of fine-tuning without a note; more memorize the samples."""


def data_notes(config: RunConfig, architecture: Architecture, train: Batches, steps: int) -> list[str]:
    """The remarks that apply to ``steps`` steps of ``train``."""
    notes = [] if config.data.mock else _repeats(config, train, steps)
    if not config.data.mock:
        name, epochs = max(train.epochs(steps).items(), key=lambda pair: pair[1])
        notes += epochs_note(config, epochs, "" if len(train.shares) == 1 else f" of data.sets.{name}")
    positions = model_positions(architecture)
    lengths = train.store.lengths  # a sample has one token more than it has positions
    longer = int(np.count_nonzero(lengths > positions + 1)) if config.data.seq_length > positions else 0
    if longer:
        notes.append(
            f"data.seq_length={config.data.seq_length} is more than the {positions:,} positions of this model "
            f"(max_position_embeddings, with its RoPE scaling), and {longer:,} of {len(lengths):,} samples are longer. "
            "Lower data.seq_length (data.overlong handles longer samples), or extend the positions with "
            "model.config.rope_scaling"
        )
    notes += few_steps_note(config, steps, train.global_batch_size, train.sequences_per_epoch)
    return notes


def few_steps_note(config: RunConfig, steps: int, batch_size: int, sequences: int) -> list[str]:
    """Whether a run has too few steps to change the model, in one line. ``train.steps`` may be a short trial."""
    if steps >= ENOUGH_STEPS or (config.train.steps is not None and steps > 1):
        return []
    smaller = "Lower the batch size or data.seq_length" if batch_size > 1 else "Lower data.seq_length"
    count = "1 step HARDLY TRAINS" if steps == 1 else f"{steps} steps HARDLY TRAIN"
    return [
        f"{count} the model: the data has {counted(sequences, 'sequence')} and train.global_batch_size={batch_size}. "
        f"{smaller}, or raise train.epochs or train.steps"
    ]


def epochs_note(config: RunConfig, epochs: float, of_set: str = "") -> list[str]:
    """Whether a fine-tuning run repeats its data too often, in one line; ``of_set`` names the set of a mixture."""
    if recipe_of(config).records.is_text or epochs <= _MOST_EPOCHS:
        return []
    train = config.train
    setting = f"train.steps={train.steps}" if train.steps is not None else f"train.epochs={train.epochs or 1:g}"
    return [
        f"{setting} takes each sample{of_set} {epoch_count(epochs)} times, and more than {_MOST_EPOCHS} epochs of "
        f"fine-tuning mostly memorize the data. {'Lower its weight' if of_set else 'Set train.epochs=3'}, or add data"
    ]


def split_note(config: RunConfig, corpus: Corpus) -> str:
    """How many samples the run trains on, and how many are for validation and test."""
    data, records = config.data, recipe_of(config).records
    parts = [f"{records.counted(len(corpus.train))} to train on"]
    uses = (("valid", "validation", corpus.valid), ("test", "test", corpus.test))
    for name, purpose, samples in uses:
        if samples is not None:
            files, fraction = getattr(data, f"{name}_files"), getattr(data, f"{name}_fraction")
            setting = f"data.{name}_files" if files else f"data.{name}_fraction={fraction:g}"
            parts.append(f"{records.counted(len(samples))} for {purpose} ({setting})")
    return f"data: {', '.join(parts)}"


def epoch_count(epochs: float) -> str:
    """Three digits, and all digits of large numbers: 0.25, 12.5, 1,000."""
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"


def epochs_text(config: RunConfig, epochs: float) -> str:
    """Epochs of a run, and the reason if they are not those of ``train.epochs``."""
    text, requested = epoch_count(epochs), config.train.epochs or 1
    why = ""
    if config.train.steps is None and text != epoch_count(requested):
        why = f" (train.epochs={requested:g}, and the last step is filled up)"
    return f"{text} {'epoch' if text == '1' else 'epochs'}{why}"


def model_positions(architecture: Architecture) -> int:
    """Positions that the model is made for. Configs of scaled RoPE give them with or without the factor."""
    positions, scaling = architecture.max_position_embeddings, architecture.rotary.rope_scaling
    if architecture.embedding.position == "learned" or scaling is None:
        return positions
    original = positions if scaling.kind == "linear" else scaling.original_max_position_embeddings
    return max(positions, math.floor(scaling.factor * original))


def _repeats(config: RunConfig, train: Batches, steps: int) -> list[str]:
    """Sequences beyond ``train.epochs``, since all steps have the same size."""
    if config.train.steps is not None:
        return []
    requested, sequences = (config.train.epochs or 1) * train.sequences_per_epoch, steps * train.global_batch_size
    more = math.floor(sequences - requested)
    if more < 1:
        return []
    return [
        f"{more:,} of {sequences:,} sequences are repeated: {counted(steps, 'step')} of {train.global_batch_size} "
        f"{'takes' if steps == 1 else 'take'} more than the {requested:,.0f} of "
        f"train.epochs={config.train.epochs or 1:g}, since the last step of an epoch is "
        "filled up with sequences of the next"
    ]
