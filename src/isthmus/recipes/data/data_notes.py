"""Remarks on the samples of a run for its log: positions that the model has not learned, repeated samples, one step."""

from __future__ import annotations

import math

import numpy as np

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches
from isthmus.families.architecture import Architecture


def data_notes(config: RunConfig, architecture: Architecture, train: Batches, steps: int) -> list[str]:
    """The remarks that apply to ``steps`` steps of ``train``."""
    notes = [] if config.data.mock else _repeats(config, train, steps)
    positions = model_positions(architecture)
    if config.data.seq_length > positions:
        lengths = train.store.lengths  # a sample has one token more than it has positions
        longer = int(np.count_nonzero(lengths > positions + 1))
        notes.append(
            f"data.seq_length={config.data.seq_length} is more than the {positions:,} positions of this model "
            f"(max_position_embeddings, with its RoPE scaling), and {longer:,} of {len(lengths):,} samples are longer. "
            "Lower data.seq_length (data.overlong handles longer samples), or extend the positions with "
            "model.config.rope_scaling"
        )
    if steps == 1:
        notes.append(
            f"this run has one step, with {train.sequences_per_epoch:,} sequences of training data and "
            f"train.global_batch_size={train.global_batch_size}, so the learning rate has no schedule. Lower the batch "
            "size, or raise train.epochs or train.steps"
        )
    return notes


def model_positions(architecture: Architecture) -> int:
    """Positions that the model is made for. Configs of scaled RoPE give them with or without the factor."""
    positions, scaling = architecture.max_position_embeddings, architecture.rope_scaling
    if architecture.position == "learned" or scaling is None:
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
        f"{more:,} of {sequences:,} sequences are repeated: {steps:,} steps of {train.global_batch_size} take more "
        f"than the {requested:,.0f} of train.epochs={config.train.epochs or 1:g}, since the last step of an epoch is "
        "filled up with sequences of the next"
    ]
