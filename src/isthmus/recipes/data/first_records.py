"""Data before it is tokenized: the first records of each file are rendered and tokenized, and its size is estimated."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from isthmus.config.schema import RunConfig
from isthmus.data.batching.bins import Bins
from isthmus.data.readers.arrow_reader import ArrowChunk, count_rows
from isthmus.data.readers.chunks import CHUNK_BYTES, FirstRecords, Record, RecordChunk
from isthmus.data.readers.csv_reader import CsvChunk
from isthmus.data.readers.data_names import is_hub_name
from isthmus.data.readers.decompress import is_compressed, open_decompressed
from isthmus.data.readers.file_formats import TextFileChunk, read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.readers.json_chunks import JsonArrayChunk, JsonLinesChunk
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import RecordTokenizer
from isthmus.errors import DataError, counted
from isthmus.files.remote_files import file_bytes
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.corpus import Corpus, split_sources, tokenize_options
from isthmus.recipes.data.data_sources import DataSource, data_settings, files_below, find_data_sources
from isthmus.recipes.data.prepare import check_not_empty
from isthmus.recipes.data.source_samples import open_samples, open_sources, write_missing_manifests
from isthmus.recipes.registry import recipe_of

_FIRST_RECORDS, _FIRST_BYTES = 8, 4096
"""Most records of each file, and bytes of each text."""
_MOST_FILES = 256
_MOST_CHUNKS = 16
"""Files whose first chunk is tokenized for the estimate."""


@dataclass(frozen=True, slots=True)
class DataEstimate:
    """Size of an epoch of the training data."""

    sequences: float
    """Packed sequences, samples, pairs or answers, as ``train.global_batch_size`` counts them."""
    tokens: float


def check_first_records(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Render and tokenize the first records of each raw file, so that a run fails before it has tokenized the others.

    Raises:
        DataError: as for the whole files.
    """
    tokenize = RecordTokenizer(tokenizer, tokenize_options(data_settings(config)))
    for source in _raw_sources(config):
        for name in _local_names(source)[:_MOST_FILES]:
            for chunk in islice(read_chunks([name]), 1):
                tokenize(_first_records(chunk))


def known_corpus(
    config: RunConfig, tokenizer: Tokenizer, *, vocab_size: int, report: Callable[[str], None]
) -> Corpus | None:
    """The data of a run if nothing has to be tokenized, else None; writes nothing."""
    if config.data.mock:
        return Corpus.mock(config, vocab_size)
    if _raw_sources(config):
        return None
    sources = find_data_sources(config)
    with TemporaryDirectory() as folder:
        for source in sources:
            write_missing_manifests(source, Path(folder))
        stores = open_sources(data_settings(config), sources, Path(folder), tokenizer, vocab_size, report, {})
    return split_sources(config.data, sources, stores)


def estimate_data(config: RunConfig, tokenizer: Tokenizer, report: Callable[[str], None]) -> DataEstimate | None:
    """Estimate the training data from the first records and the sizes of the files; None if that is not possible."""
    data = config.data
    sequences, tokens, known = 0.0, 0.0, True
    rest = 1.0 - sum(
        fraction
        for fraction, files in ((data.valid_fraction, data.valid_files), (data.test_fraction, data.test_files))
        if not files
    )
    for source in find_data_sources(config):
        size = (
            _prepared_size(config, source, tokenizer) if source.prepared else _size(config, source, tokenizer, report)
        )
        if source.use == "train":
            known &= size is not None
            sequences += rest * (size or (0, 0))[0]
            tokens += rest * (size or (0, 0))[1]
    return DataEstimate(sequences, tokens) if known else None


@dataclass(frozen=True, slots=True)
class _TextStart:
    """The start of a text file, which may be large."""

    path: str
    num_bytes: int

    def parse(self) -> Iterator[Record | DataError]:
        with open_decompressed(self.path) as file:
            raw = file.read(self.num_bytes)
        try:
            yield Record({"text": codecs.getincrementaldecoder("utf-8-sig")().decode(raw)}, f"{self.path}:1")
        except UnicodeDecodeError as error:
            yield DataError(f"{self.path}: not UTF-8 at byte {error.start}. Convert the file.")


def _raw_sources(config: RunConfig) -> list[DataSource]:
    return [] if config.data.mock else [source for source in find_data_sources(config) if not source.prepared]


def _local_names(source: DataSource) -> list[str]:
    """Data sets on the Hub are not opened: the run downloads them."""
    return [name for name in find_sources(source.files).names if not is_hub_name(name)]


def _prepared_size(config: RunConfig, source: DataSource, tokenizer: Tokenizer) -> tuple[float, float]:
    with TemporaryDirectory() as folder:
        write_missing_manifests(source, Path(folder))
        store, _ = open_samples(source, data_settings(config), tokenizer, Path(folder))
    inputs = np.maximum(store.lengths - 1, 0)
    return _num_sequences(config, inputs), _num_tokens(config, inputs)


def _size(
    config: RunConfig, source: DataSource, tokenizer: Tokenizer, report: Callable[[str], None]
) -> tuple[float, float] | None:
    """(sequences, tokens with a label) of the files of a source; None if it cannot be estimated."""
    tokenize, names = RecordTokenizer(tokenizer, tokenize_options(data_settings(config))), _local_names(source)
    stats, known = TokenizeStats(), len(names) == len(find_sources(source.files).names)
    is_complete = known and len(names) <= _MOST_CHUNKS
    sequences = tokens = num_records = seen_bytes = 0.0
    for number, name in enumerate(names[:_MOST_FILES]):
        first, *more = islice(read_chunks([name]), 2)
        done = tokenize(_start_of(first, CHUNK_BYTES) if number < _MOST_CHUNKS else _first_records(first))
        stats.add(done.stats)
        if number >= _MOST_CHUNKS:
            continue
        chunks = _chunks(first, name, done.stats.records) if more or isinstance(first, TextFileChunk) else 1.0
        known &= chunks is not None
        is_complete &= chunks == 1.0
        inputs = np.maximum(done.lengths - 1, 0)
        sequences += _num_sequences(config, inputs) * (chunks or 0)
        tokens += _num_tokens(config, inputs) * (chunks or 0)
        num_records += done.stats.records * (chunks or 0)
        seen_bytes += _num_bytes(name)
    if not_opened := [name for name in find_sources(source.files).names if is_hub_name(name)]:
        report(f"{source.name}: {', '.join(not_opened)} is not checked here: the run downloads it")
    if names:
        records = recipe_of(config).records
        report(f"{source.name}: {counted(len(names), 'file')}, the first records: {stats.summary(records)}")
    if is_complete:
        check_not_empty(stats, names, tokenize.options)
    if not known or not sequences:
        return None
    share = sum(map(_num_bytes, names)) / seen_bytes
    if source.use == "train" and config.data.max_samples is not None:
        share *= min(1.0, config.data.max_samples / (num_records * share))
    return sequences * share, tokens * share


def _num_sequences(config: RunConfig, inputs: npt.NDArray[np.int64]) -> int:
    """As ``train.global_batch_size`` counts them, of samples with so many inputs."""
    length, recipe = config.data.seq_length, recipe_of(config)
    if recipe.records.is_text:  # documents are cut into samples
        inputs = np.concatenate([np.repeat(length, (inputs // length).sum()), inputs % length])
    if config.data.packing and recipe.bin_packs:
        return len(Bins.packed(inputs[inputs > 0], length, 0)) if inputs.any() else 0
    answers = config.rollout.group_size if recipe.generates_answers else 1
    return len(inputs) * answers // recipe.samples_per_sequence


def _num_tokens(config: RunConfig, inputs: npt.NDArray[np.int64]) -> float:
    """Tokens that training computes of samples with so many inputs; answers to prompts are as long as possible."""
    if not recipe_of(config).generates_answers:
        return float(inputs.sum())
    return float(config.rollout.group_size * (inputs + config.rollout.max_new_tokens).sum())


def _first_records(chunk: RecordChunk) -> RecordChunk:
    return FirstRecords(_start_of(chunk, _FIRST_BYTES), _FIRST_RECORDS)


def _start_of(chunk: RecordChunk, num_bytes: int) -> RecordChunk:
    return _TextStart(chunk.path, num_bytes) if isinstance(chunk, TextFileChunk) else chunk


def _chunks(first: RecordChunk, name: str, records: int) -> float | None:
    """How many times the file has the content of its first chunk; None if only reading it would show that."""
    if isinstance(first, ArrowChunk):
        return count_rows(name) / max(1, records)
    if is_compressed(name):
        return None
    read = CHUNK_BYTES  # of a text file
    if isinstance(first, JsonLinesChunk):
        read = len(first.raw)
    elif isinstance(first, JsonArrayChunk):
        read = sum(len(text.encode()) + 2 for _, text in first.texts)
    elif isinstance(first, CsvChunk):
        read = sum(len(",".join(row).encode()) + 1 for _, row in first.rows)
    return max(1.0, file_bytes(name) / read)


def _num_bytes(name: str) -> int:
    return sum(file_bytes(path) for path in files_below(name))
