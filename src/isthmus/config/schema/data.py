"""Training, validation and test data."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.config.schema.section import Count, Length, Paths, Section, Seed, lacks, refuse

DOCUMENT_SETTINGS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
"""What happens at a document end within a sequence, for pretraining."""


def columns_of(value: object) -> object:
    """``text=body,prompt=question`` as a mapping; other values are unchanged, for the error of the schema."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",")]
    if not all(known.strip() and name.strip() for known, _, name in pairs):
        return value
    columns = {known.strip(): name.strip() for known, _, name in pairs}
    return columns if len(columns) == len(pairs) else value


Columns = Annotated[dict[str, str], BeforeValidator(columns_of, json_schema_input_type=dict[str, str] | str)]


class DataSet(Section):
    """One of several data sets that are mixed."""

    files: Paths = Field(min_length=1)
    """Its files, as in data.files."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the sequences from this set, relative to the other weights."""


class DataConfig(Section):
    """Training, validation and test data, and how samples are made of them."""

    exclusive: ClassVar[tuple[str, ...]] = ("files", "sets", "mock")
    files: Paths = ()
    """Training files, folders, patterns, hf:ORG/NAME:SPLIT or prepared prefixes; required without sets and mock."""
    sets: dict[str, DataSet] = Field(default_factory=dict)
    """Instead of files: several named data sets, mixed by weight."""
    mock: bool = False
    """Instead of files: samples of seq_length random tokens, to test a layout or its speed; needs train.steps."""
    max_samples: Count | None = None
    """Only the first so many records of the training data, of each of its sets, for a trial; null: all. Validation and
    test splits are taken from them; valid_files and test_files are complete."""
    columns: Columns = Field(default_factory=dict)
    """Field names of the records in the files, by the names that Isthmus uses: {text: body}, or text=body."""
    valid_files: Paths = ()
    """Validation files; without them valid_fraction of the training samples is used."""
    valid_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the training samples for validation if there are no valid_files; 0: no validation."""
    test_files: Paths = ()
    """Test files, evaluated once after the last step; without them test_fraction of the training samples is used."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training samples for the test if there are no test_files; 0: no test."""
    seq_length: Length = 2048
    """Maximum number of tokens of a sequence."""
    packing: bool = True
    """Pack several samples into a sequence; attention stays within each sample."""
    reset_attention_mask: bool = True
    """pretrain: attention stays within each document; false: it crosses the document ends of a sequence."""
    reset_position_ids: bool = True
    """pretrain: positions restart in each document; false: they continue over document ends."""
    eod_mask_loss: bool = True
    """pretrain: no loss for the first token of a document; false: the document before it predicts it."""
    seed: Seed = 0
    """Seed of the sample order and of the validation and test split."""
    loss_on: Literal["assistant", "all", "last"] = "assistant"
    """sft, distill: which tokens of a chat are loss tokens: all assistant turns, all tokens, or the last assistant
    turn."""
    overlong: Literal["truncate", "split", "drop", "error"] = "truncate"
    """All but pretrain: a sample of more than seq_length tokens is truncated, split into several (chats only), dropped,
    or an error. A prompt of grpo without room for an answer is dropped, or an error."""
    on_error: Literal["stop", "skip"] = "stop"
    """Stop at a record that cannot be read, or skip and count it."""
    length_buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Lengths in tokens: each packed sequence of a micro batch is padded to the next one; none: no padding."""

    @property
    def crosses_documents(self) -> bool:
        """Whether samples are windows over several documents, as in Megatron-LM, and not of one document."""
        return not all(getattr(self, name) for name in DOCUMENT_SETTINGS)

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        sources = [name for name in self.exclusive if getattr(self, name)]
        if not sources:
            lacks("files")
        if len(sources) > 1:
            refuse(sources[1], f"got {' and '.join(sources)}; keep one of them")
        return self

    @model_validator(mode="after")
    def _some_data_is_left(self) -> DataConfig:
        valid = 0 if self.valid_files else self.valid_fraction
        test = 0 if self.test_files else self.test_fraction
        if valid + test >= 1 and not self.mock:
            refuse(
                "test_fraction",
                f"valid_fraction={valid:g} and test_fraction={test:g} leave no training samples; lower one of them",
            )
        return self

    @model_validator(mode="after")
    def _mock_data_has_no_files(self) -> DataConfig:
        for name in (
            ("valid_files", "test_files", "max_samples", "columns", "loss_on", "overlong", "on_error")
            if self.mock
            else ()
        ):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                refuse(name, f"{name} is for data files, and mock=true reads none; leave it out")
        return self

    @model_validator(mode="after")
    def _buckets_ascend(self) -> DataConfig:
        ascending = tuple(sorted(set(self.length_buckets)))
        if self.length_buckets != ascending:
            refuse(
                "length_buckets",
                f"length_buckets must be in ascending order without repeats, got {list(self.length_buckets)}; use "
                f"{list(ascending)}",
            )
        return self
