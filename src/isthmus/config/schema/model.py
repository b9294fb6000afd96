"""The model a run starts from, and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from isthmus.config.presets import is_model_file
from isthmus.config.schema.section import Count, PathText, Section, lacks, refuse


class ModelConfig(Section):
    """The model to start from."""

    path: PathText | None = None
    """Hugging Face model folder, the id of one on the Hub, preset:NAME, or YAML with the keys of a config.json."""
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
        if self.path is not None and is_model_file(self.path) and self.init != "random":
            refuse(
                "init",
                f"{self.path} is a model without weights; set model.init=random, or start from a folder or an id",
            )
        if self.path is None and "model_type" not in self.config:
            refuse("config", "config is a whole model where there is no path, and lacks its model_type; give either")
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
    """NullTokenizer: how many numbers, from 0, it takes for tokens; the end of a document is one more."""

    @model_validator(mode="after")
    def _numbers_need_no_files(self) -> TokenizerConfig:
        if self.type != "NullTokenizer" and self.vocab_size is not None:
            refuse("vocab_size", "vocab_size is for NullTokenizer; others bring their own. Leave it out")
        if self.type == "NullTokenizer" and self.path is not None:
            refuse("path", "NullTokenizer reads numbers and has no files; leave path out, or type")
        if self.type == "NullTokenizer" and self.vocab_size is None:
            lacks("vocab_size")
        return self
