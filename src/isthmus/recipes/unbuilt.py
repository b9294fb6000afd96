"""Settings that nothing honours yet."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError


def check_built(config: RunConfig) -> None:
    """Refuse them.

    Raises:
        UsageError: naming the first.
    """
    model, tokenizer = config.model, config.tokenizer
    unbuilt = {
        "model.config": model.config,
        "tokenizer.path": tokenizer.path,
        "tokenizer.type": tokenizer.type,
        "tokenizer.vocab_size": tokenizer.vocab_size,
    }
    for name, value in unbuilt.items():
        if value:
            raise UsageError(f"{name} is not built yet. Leave it out.")
