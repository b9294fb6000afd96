"""The data of a run: counts and lengths from the manifests, packing and samples from its tokenized data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from isthmus.config.schema import RunConfig
from isthmus.data.store.manifest import indexed_file, read_manifest
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.errors import IsthmusError
from isthmus.recipes.data.data_sources import find_data_sources
from isthmus.recipes.data.recorded_data import RecordedData, open_recorded
from isthmus.recipes.data.shown_samples import ShownSample, TextPart
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.run_dir import RunDir

Result = TypeVar("Result")
_MOST_CHARACTERS = 6_000
"""Most characters of a sample."""


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One data set."""

    name: str
    stats: TokenizeStats

    @property
    def lengths(self) -> list[tuple[str, int, float]]:
        """Rows of the histogram: tokens, samples, and their share of the largest row."""
        counts = sorted(self.stats.lengths.items())
        largest = max((count for _, count in counts), default=1)
        return [(f"{most // 2 + 1:,}-{most:,}", count, count / largest) for most, count in counts]


@dataclass(frozen=True, slots=True)
class Packing:
    sequences: int
    """Packed sequences of an epoch."""
    samples: int
    tokens: float
    """Mean tokens of a sequence."""
    seq_length: int

    @property
    def fill(self) -> float:
        """Tokens of a sequence over ``data.seq_length``, 0..1."""
        return self.tokens / self.seq_length


@dataclass(slots=True)
class DataSummary:
    sources: list[SourceSummary] = field(default_factory=list)
    packing: Packing | None = None
    samples: list[ShownSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be read."""


def data_summary(run: RunDir, config: RunConfig, num_samples: int) -> DataSummary:
    """The statistics of the data; ``notes`` names what is missing, since data files are often moved or removed."""
    summary = DataSummary()
    if config.data.mock:
        summary.notes.append("data.mock=true: random tokens")
        return summary
    data = None
    if _or_note(summary, lambda: _add_sources(summary, run, config)):
        data = _or_note(summary, lambda: open_recorded(run))
    if data is not None:
        summary.packing = None if recipe_of(config).generates_answers else _packing(data, config)
        summary.samples = _or_note(summary, lambda: list(map(_clipped, data.samples(0, num_samples)))) or []
    return summary


def _or_note(summary: DataSummary, read: Callable[[], Result]) -> Result | None:
    try:
        return read()
    except (IsthmusError, OSError) as problem:
        if (note := str(problem)) not in summary.notes:
            summary.notes.append(note)
        return None


def _add_sources(summary: DataSummary, run: RunDir, config: RunConfig) -> bool:
    """Returns whether all data is there."""
    sources = find_data_sources(config, run.data)
    missing = [source.name for source in sources if not source.prepared and not _has_tokens(run, source.key)]
    if missing:
        summary.notes.append(f"{run.data} has no tokenized samples of {', '.join(missing)}; they are not shown")
    for source in sources:
        if source.name in missing:
            continue
        total = TokenizeStats()
        for prefix in source.files if source.prepared else [run.data / source.key]:
            path = indexed_file(prefix, ".json")
            try:
                total.add(TokenizeStats.from_dict(read_manifest(path)["report"]))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError, IsthmusError) as problem:
                reason = problem if isinstance(problem, IsthmusError) else f"{path} has no counts of samples"
                summary.notes.append(f"{source.name}: {reason}")
        if total.records:
            summary.sources.append(SourceSummary(source.name, total))
    return not missing


def _has_tokens(run: RunDir, key: str) -> bool:
    return indexed_file(run.data / key, ".idx").is_file()


def _packing(data: RecordedData, config: RunConfig) -> Packing:
    train = data.train
    tokens = train.tokens_per_step / train.global_batch_size
    return Packing(train.sequences_per_epoch, len(train.store), tokens, config.data.seq_length)


def _clipped(sample: ShownSample) -> ShownSample:
    """At most so many characters as a reader needs."""
    parts, remaining = list[TextPart](), _MOST_CHARACTERS
    for part in sample.parts:
        if len(part.text) > remaining:
            rest = sum(len(part.text) for part in sample.parts) - _MOST_CHARACTERS
            parts += [replace(part, text=part.text[:remaining]), TextPart(f" ... ({rest:,} more characters)", False)]
            break
        parts.append(part)
        remaining -= len(part.text)
    return replace(sample, parts=tuple(parts))
