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
    """Share of the samples that come from this set, relative to the weights of the others."""


class DataConfig(Section):
    """What is learned from, and how it is cut."""

    files: Paths = ()
    """Training files, folders of them, patterns, or hf:ORG/NAME:SPLIT. Needed, unless there are sets, or mock data."""
    sets: dict[str, DataSet] = Field(default_factory=dict)
    """Instead of files: several sets by name, mixed by weight."""
    mock: bool = False
    """Instead of files: made-up samples of seq_length tokens, to try a layout or measure its speed."""
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
    """sft: what happens to a sample of more than seq_length tokens."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens at a record that cannot be read: stop, or leave it out and count it."""
    length_buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Lengths that lines are padded to, the next above their own, so that few shapes come up; none: no padding."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        given = [name for name in ("files", "sets", "mock") if getattr(self, name)]
        if not given:
            lacks("files")
        if len(given) > 1:
            refuse(given[1], f"{' and '.join(given)} are all given; keep one of them")
        return self
