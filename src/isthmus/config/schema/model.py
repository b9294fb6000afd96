"""The model a run starts from, and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from isthmus.config.presets import PREFIX, is_model_file, not_a_preset
from isthmus.config.schema.section import PathText, Section, lacks, refuse


class ModelConfig(Section):
    """The model to start from."""

    path: PathText | None = None
    """Hugging Face model folder, Hub id, preset:NAME, or YAML with the keys of a config.json."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of a config.json that override those of path, or without path a whole config. With the weights of path, the
    keys must leave its tensors as they are."""
    init: Literal["hf", "random"] = "hf"
    """Initial weights: those of the folder (hf) or random ones."""
    trust_remote_code: bool = False
    """Run the tokenizer's Python code from the model folder."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Dtype of the exported weights; source: the dtype of each tensor in the source."""

    @model_validator(mode="after")
    def _is_a_model(self) -> ModelConfig:
        if self.path is None and not self.config:
            lacks("path")
        if self.path is not None and self.path.startswith(PREFIX) and (why := not_a_preset(self.path, "models")):
            refuse("path", why.removesuffix("."))
        if self.path is None and self.init != "random":
            refuse("init", "config has no weights; set model.init=random, or give model.path")
        if self.path is not None and is_model_file(self.path) and self.init != "random":
            refuse(
                "init",
                f"{self.path} has no weights; set model.init=random, or give a model folder or a Hub id",
            )
        if self.path is None and "model_type" not in self.config:
            refuse(
                "config",
                "without path, config must be a whole config.json with model_type; add model_type, or give path",
            )
        return self


class TokenizerConfig(Section):
    """The tokenizer."""

    path: PathText | None = None
    """Folder, Hub id, or the file tokenizer.model; null: the model's tokenizer."""
    type: (
        Literal["HuggingFaceTokenizer", "Llama2Tokenizer", "DeepSeekV2Tokenizer", "GPT2BPETokenizer", "NullTokenizer"]
        | None
    ) = None
    """Megatron-LM's name of the tokenizer type, checked against the files; null: the type of the files."""
    vocab_size: int | None = Field(default=None, ge=1, le=2**22)
    """NullTokenizer: number of token ids; the end-of-document token is one more."""

    @model_validator(mode="after")
    def _null_tokenizer_has_no_files(self) -> TokenizerConfig:
        if self.type != "NullTokenizer" and self.vocab_size is not None:
            refuse("vocab_size", "vocab_size is for NullTokenizer; other tokenizers have their own. Leave it out")
        if self.type == "NullTokenizer" and self.path is not None:
            refuse("path", "NullTokenizer has no files; leave out path or type")
        if self.type == "NullTokenizer" and self.vocab_size is None:
            lacks("vocab_size")
        return self
