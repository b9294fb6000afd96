"""What a run learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Count, Paths, Section, lacks, refuse


class DataSet(Section):
    """One of several sets of training data that are mixed."""

    files: Paths = Field(min_length=1)
    """As data.files."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the sequences that come from this set, relative to the weights of the others."""


class DataConfig(Section):
    """What is learned from, and how it is cut."""

    files: Paths = ()
    """Training files, folders, patterns, hf:ORG/NAME:SPLIT, prefixes of prepared pairs; needed unless sets or mock."""
    sets: dict[str, DataSet] = Field(default_factory=dict)
    """Instead of files: several sets by name, mixed by weight."""
    mock: bool = False
    """Instead of files: random tokens in samples of seq_length, to try a layout or its speed; needs train.steps."""
    columns: dict[str, str] = Field(default_factory=dict)
    """What the fields of records are called in the files, by the names known here, such as text: body."""
    valid_files: Paths = ()
    """Held-out files; if there are none, valid_fraction of the training samples is held out."""
    valid_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the training samples that is held out when there are no valid_files; 0: none."""
    test_files: Paths = ()
    """Files whose loss is told once, after the last step; if there are none, test_fraction is held out for it."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training samples that is held out for the test when there are no test_files; 0: no test."""
    seq_length: Count = 2048
    """Most tokens in a sequence."""
    packing: bool = True
    """Put several samples into one sequence; attention stays inside each sample."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of the samples and of the held-out split."""
    loss_on: Literal["assistant", "all", "last"] = "assistant"
    """sft: which tokens of a chat are learned: every assistant turn, everything, or the last assistant turn."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """sft, dpo: what happens to a sample of more than seq_length tokens: its end is cut off, or it is left out."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens at a record that cannot be read: stop, or leave it out and count it."""
    length_buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Tokens that a line of micro_batch_size sequences is padded to, the next above its own; none: no padding."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        given = [name for name in ("files", "sets", "mock") if getattr(self, name)]
        if not given:
            lacks("files")
        if len(given) > 1:
            refuse(given[1], f"{' and '.join(given)} are all given; keep one of them")
        return self

    @model_validator(mode="after")
    def _some_is_left(self) -> DataConfig:
        held = 0 if self.valid_files else self.valid_fraction
        tested = 0 if self.test_files else self.test_fraction
        if held + tested >= 1 and not self.mock:
            refuse(
                "test_fraction",
                f"valid_fraction={held:g} and test_fraction={tested:g} leave nothing to learn from; lower one",
            )
        return self

    @model_validator(mode="after")
    def _made_up_data_is_of_no_files(self) -> DataConfig:
        for name in ("valid_files", "test_files", "columns", "loss_on", "overlong", "on_error") if self.mock else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                refuse(name, f"{name} says something about files, and mock=true has none; leave it out")
        return self

    @model_validator(mode="after")
    def _buckets_ascend(self) -> DataConfig:
        ascending = tuple(sorted(set(self.length_buckets)))
        if self.length_buckets != ascending:
            refuse(
                "length_buckets",
                f"length_buckets={list(self.length_buckets)} do not ascend, each once; write {list(ascending)}",
            )
        return self
