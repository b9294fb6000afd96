"""Inputs of each layer besides the hidden states (Gemma 3n)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules.decoder import in_layer, layer_norm, norm
from isthmus.families.rules.rule import copy, where

_SIZE, _ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"


def _read(hf: Mapping[str, Any]) -> int:
    size: int = Key(_SIZE, default=256, least=0).read(hf)
    rows, tokens = (Key(name, default=262144).read(hf) for name in (_ROWS, "vocab_size"))
    if size and rows != tokens:
        raise UsageError(f"config.json: {_ROWS}={rows} is not supported; it must be vocab_size={tokens}.")
    return size


SIZE = Derived(_read, lambda size, arch: {_SIZE: size, _ROWS: arch.vocab_size})
_ALL = "embedding.layer_inputs."
RULES = where(
    "layer_input_size",
    in_layer("layer_input.linear_down_proj.weight", "per_layer_input_gate.weight", "Iw", "H"),
    in_layer("layer_input.linear_up_proj.weight", "per_layer_projection.weight", "H", "Iw"),
    *layer_norm("layer_input.layernorm", "post_per_layer_input_norm"),
)
EMBEDDING = where(
    "layer_input_size",
    copy(_ALL + "word_embeddings.weight", "model.embed_tokens_per_layer.weight", "V", "Ia", shard="vocab"),
    copy(_ALL + "linear_down_proj.weight", "model.per_layer_model_projection.weight", "Ia", "H"),
    *norm(_ALL + "layernorm", "model.per_layer_projection_norm", "Iw"),
)
