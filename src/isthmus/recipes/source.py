"""The model folder that a run starts from, wherever its config says it is."""

from __future__ import annotations

from isthmus.config.schema.model import ModelConfig
from isthmus.hf.folder import ModelFolder


def open_source(model: ModelConfig) -> ModelFolder:
    """Open what ``model.path`` names.

    Raises:
        MissingInput, DataError: it is absent or damaged.
    """
    assert model.path is not None
    return ModelFolder.open(model.path)
