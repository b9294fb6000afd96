"""Special tokens that a config does not name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.hf.model_folder import SPECIAL_TOKENS as SPECIAL_TOKENS


def tokens_beyond_vocabulary(config: Mapping[str, Any]) -> dict[str, None]:
    """None for each special token that the config does not name and its class sets to an id beyond the vocabulary.

    Without it a GPT-2 with a vocabulary of its own would begin and end with 50256.
    """
    if "vocab_size" not in config:  # of a language model within another config
        return {}
    from isthmus.hf.tiny_model import default_config  # imports models, which most conversions do not need

    defaults = default_config(config["model_type"])
    tokens = {name: defaults.get(name) for name in SPECIAL_TOKENS if name not in config}
    return {name: None for name, token in tokens.items() if isinstance(token, int) and token >= config["vocab_size"]}
