"""Tiny models with no dead weight in them, and samples whose lengths and learned tokens are uneven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isthmus.data.store import SampleStore

VOCAB = 77
"""No multiple of any number of ranks, so that the embedding is padded."""
SEQ_LENGTH = 24
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}


def build_model_folder(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, shards: str = "5GB", **settings: Any
) -> Path:
    """Save a transformers model with random weights, norms and biases included: ones and zeros would hide a swap."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name or ".ln_" in name else 0.0, std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def build_samples(folder: Path, *, count: int = 60, seed: int = 0) -> Path:
    """Save ``count`` samples of 3 to 24 tokens; in one the whole text is learned, in the next hardly any of it."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(random.integers(3, SEQ_LENGTH + 1))
        mask = (random.random(length) < (0.9 if number % 2 else 0.2)).astype(np.uint8)
        mask[-1] = 1
        samples.append((random.integers(0, VOCAB, length).astype(np.int32), mask))
    SampleStore.from_samples(samples).save(folder)
    return folder
