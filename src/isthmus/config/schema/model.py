"""The model a run starts from, and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Count, PathText, Section, lacks, refuse


class ModelConfig(Section):
    """The model to start from."""

    path: PathText | None = None
    """Hugging Face model folder, the id of one on the Hub, or preset:NAME: config, tokenizer, and the weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of a config.json, laid over those of path; or a whole model, where there is no path (init=random)."""
    init: Literal["hf", "random"] = "hf"
    """Where the weights start: those of the folder, or random ones."""
    trust_remote_code: bool = False
    """Let the folder's own Python code build its tokenizer."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Type of the exported weights; source: each tensor as it came."""

    @model_validator(mode="after")
    def _is_a_model(self) -> ModelConfig:
        if self.path is None and not self.config:
            lacks("path")
        if self.config and self.init != "random":
            refuse("config", "config changes the model, so its weights do not fit; set model.init=random as well")
        return self


class TokenizerConfig(Section):
    """What turns text into tokens."""

    path: PathText | None = None
    """Folder or id on the Hub, or the file tokenizer.model; null: the model's own."""
    type: (
        Literal["HuggingFaceTokenizer", "Llama2Tokenizer", "DeepSeekV2Tokenizer", "GPT2BPETokenizer", "NullTokenizer"]
        | None
    ) = None
    """Megatron-LM's name for its kind, checked against what lies there; null: whatever it is."""
    vocab_size: Count | None = None
    """NullTokenizer: how many numbers it takes for tokens."""
