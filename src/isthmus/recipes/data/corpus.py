"""The data of a run: rank 0 tokenizes raw files into the run folder, and every rank maps the result."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from isthmus.config.schema import RunConfig
from isthmus.config.schema.data import DOCUMENT_SETTINGS, DataConfig
from isthmus.data.batching.batches import Batches, BatchSettings, BatchShard, DocumentEnds
from isthmus.data.readers.data_names import PARTIAL
from isthmus.data.readers.file_formats import check_columns
from isthmus.data.readers.file_sources import find_sources, first_names
from isthmus.data.store.answer_views import AnswerEnd, ScoredSamples
from isthmus.data.store.indexed_dataset import indexed_file
from isthmus.data.store.mixture import MixtureSet
from isthmus.data.store.sample_store import MockSamples, Samples, SampleStore, split
from isthmus.data.store.token_windows import TokenWindows
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.engine.parallel.process_groups import Position, agree, on_rank_0
from isthmus.errors import DataError, Hang, Preempted, UsageError
from isthmus.files.atomic_write import write_atomic
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_sources import (
    DataSettings,
    DataSource,
    Report,
    Use,
    changed_files,
    data_fingerprint,
    find_data_sources,
    known_digests,
    read_fingerprint,
    same_data,
)
from isthmus.recipes.data.prepare import tokenize_files
from isthmus.recipes.data.source_samples import open_sources, write_missing_manifests
from isthmus.recipes.registry import recipe_of
from isthmus.train.stop import StopFlag

_FINGERPRINT = "source.json"


@dataclass(frozen=True, slots=True)
class Corpus:
    train: Samples
    valid: Samples | None
    test: Samples | None = None
    mixture: tuple[MixtureSet, ...] = ()
    """The sets of ``train``; empty for a single set."""

    @classmethod
    def mock(cls, config: RunConfig, vocab_size: int) -> Corpus:
        """Random tokens; the sizes of validation and test are fractions of the samples that the run trains on."""

        def part(name: Literal["valid", "test"], fraction: float) -> MockSamples | None:
            sequences = (config.train.steps or 0) * config.train.global_batch_size
            return make(part=name, count=max(1, round(fraction * sequences))) if fraction else None

        data = config.data
        make = partial(MockSamples, seq_length=data.seq_length, vocab_size=vocab_size, seed=data.seed)
        return cls(make(), part("valid", data.valid_fraction), part("test", data.test_fraction))

    def fingerprint(self, config: RunConfig) -> str:
        """Equal if step k of two runs takes the same sequences."""
        data = config.data
        order: list[Any] = [self.train.digest(), data.seq_length, data.packing, data.seed]
        order += [config.train.global_batch_size, [[data_set.samples, data_set.weight] for data_set in self.mixture]]
        if data.crosses_documents:
            order += [getattr(data, name) for name in DOCUMENT_SETTINGS]
        return hashlib.blake2b(json.dumps(order).encode(), digest_size=16).hexdigest()

    def batches(
        self,
        config: RunConfig,
        position: Position,
        dp: int,
        *,
        eod: int | None,
        device_type: str,
        share_prefixes: bool = False,
        end: AnswerEnd | None = None,
    ) -> tuple[Batches, Batches | None, Batches | None]:
        """Training, validation and test batches of this rank.

        ``eod`` is the tokenizer's end-of-document token, ``end`` is for reward models.
        """
        settings = BatchSettings(
            seq_length=config.data.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            packing=config.data.packing,
            seed=config.data.seed,
            shuffle=not config.data.mock,  # mock samples are random already
            length_buckets=config.data.length_buckets,
            documents=_document_ends(config.data, eod, crosses=isinstance(self.train, TokenWindows)),
            share_prefixes=share_prefixes,
        )
        shard = BatchShard(
            dp_rank=position.dp_rank,
            dp_size=dp,
            pad_to_multiple_of=config.parallel.length_multiple,
            # The interleaved pipeline schedule runs micro batches in rounds of pp.
            micro_batches_multiple_of=config.parallel.pp if config.parallel.vpp > 1 else 1,
            equal_lengths=pads_to_one_length(config, device_type),
        )
        make = partial(make_batches, config, shard=shard, end=end)

        def in_order(samples: Samples | None) -> Batches | None:
            return None if samples is None else make(samples, replace(settings, shuffle=False))

        return make(self.train, settings, shares=self.mixture), in_order(self.valid), in_order(self.test)


def make_batches(
    config: RunConfig,
    samples: Any,
    settings: BatchSettings,
    shard: BatchShard,
    *,
    shares: Sequence[MixtureSet] = (),
    end: AnswerEnd | None = None,
) -> Batches:
    """The batches of the recipe; ``end`` is for reward models."""
    recipe = recipe_of(config)
    if recipe.trains_scores:
        samples = ScoredSamples(samples, end or AnswerEnd(), most=settings.seq_length)
    return recipe.batches(config)(samples, settings, shard, shares=shares)


def pads_to_one_length(config: RunConfig, device_type: str) -> bool:
    """Whether the micro batches of a step are padded to one length, so that pipeline stages exchange no shapes.

    On a CPU and without packing the additional tokens cost more; with an expert capacity they would change which
    tokens are dropped.
    """
    pays = config.parallel.pp > 1 and device_type == "cuda" and config.data.packing
    return pays and config.moe.capacity_factor is None


def _document_ends(data: DataConfig, eod: int | None, *, crosses: bool) -> DocumentEnds | None:
    """What ends of documents in a sample do; ``crosses`` if samples have them whatever the settings are."""
    if not (data.crosses_documents or crosses) or data.mock:  # random tokens are no documents
        return None
    settings = {name: getattr(data, name) for name in DOCUMENT_SETTINGS}
    if eod is None and crosses:
        raise UsageError("a set of this size needs an eos_token of the tokenizer, which ends documents. Set one.")
    if eod is None:
        off = ", ".join(f"data.{name}" for name, on in settings.items() if not on)
        raise UsageError(f"{off}=false: the tokenizer has no eos_token that ends documents. Set one, or leave it out.")
    return DocumentEnds(eod=eod, **settings)


def check_files(config: RunConfig) -> None:
    """Check the data files before the model is loaded."""
    find_data_sources(config)
    check_columns(config.data.columns)


def load_corpus(
    settings: DataSettings,
    sources: Sequence[DataSource],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    resume: Path | None,
    stop: StopFlag,
    report: Report,
) -> Corpus:
    """Tokenize raw sources into ``folder``, unless it has the same data, and open the samples; a collective.

    With ``resume`` changed data is a DataError. A stop request raises Preempted and keeps the finished parts.
    """
    tokenized: dict[str, TokenizeStats] = {}  # on rank 0, of the sources that were tokenized now
    on_rank_0(
        lambda: tokenized.update(_tokenize_sources(settings, sources, folder, tokenizer, resume, stop, report)),
        "corpus",
    )
    stores: list[SampleStore | TokenWindows] = []
    agree(lambda: stores.extend(open_sources(settings, sources, folder, tokenizer, vocab_size, report, tokenized)))
    return split_sources(settings.data, sources, stores)


def compare_data(
    settings: DataSettings, sources: Sequence[DataSource], folder: Path, tokenizer: Tokenizer, resume: Path | None
) -> tuple[dict[str, Any], bool]:
    """(fingerprint of the data, whether ``folder`` has the same); with ``resume`` changed data is a DataError."""
    earlier = read_fingerprint(folder / _FINGERPRINT)
    fingerprint = data_fingerprint(settings, sources, tokenizer, earlier)
    same = same_data(fingerprint, earlier)
    if not same and earlier and resume is not None:
        check_fingerprint(str(earlier), str(fingerprint), resume, changed_files(fingerprint, earlier))
    return fingerprint, same


def _tokenize_sources(
    settings: DataSettings,
    sources: Sequence[DataSource],
    folder: Path,
    tokenizer: Tokenizer,
    resume: Path | None,
    stop: StopFlag,
    report: Report,
) -> dict[str, TokenizeStats]:
    """Tokenize the raw sources that ``folder`` does not have yet; returns their stats by key."""
    fingerprint, same = compare_data(settings, sources, folder, tokenizer, resume)
    digests, options = known_digests(fingerprint), tokenize_options(settings)
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_atomic(folder / _FINGERPRINT, json.dumps(fingerprint))
    tokenized: dict[str, TokenizeStats] = {}
    for source in sources:
        if source.prepared:
            if write_missing_manifests(source, folder):
                report(f"{source.name}: read once, since it has no manifest")
        elif not indexed_file(folder / source.key, ".json").is_file():
            most = settings.data.max_samples if source.use == "train" else None
            limited = replace(options, max_records=most)
            tokenized[source.key] = _tokenize_source(limited, source, folder, tokenizer, stop, digests)
        else:  # an interrupted run may have left the parts
            shutil.rmtree(indexed_file(folder / source.key, PARTIAL), ignore_errors=True)
    if same and not tokenized:
        report(f"data: {folder} has the tokenized data of the same files; it is reused")
    return tokenized


def tokenize_options(settings: DataSettings) -> TokenizeOptions:
    """How the records of a run's raw files become samples."""
    data, records = settings.data, settings.recipe.records
    return TokenizeOptions(
        records.name,
        seq_length=None if records.is_text else settings.most_targets,
        loss_on="assistant" if records.is_text or records.is_answers else data.loss_on,
        overlong=settings.overlong,
        on_error=data.on_error,
        columns=data.columns,
        chat=settings.chat,
    )


def _tokenize_source(
    options: TokenizeOptions,
    source: DataSource,
    folder: Path,
    tokenizer: Tokenizer,
    stop: StopFlag,
    digests: dict[str, str],
) -> TokenizeStats:
    def check_stop(_: TokenizeStats) -> None:
        if stop.requested:
            raise Preempted("stopped while tokenizing, as requested. Run the same command again to continue.")

    files = find_sources(source.files)
    try:
        return tokenize_files(
            files, folder / source.key, tokenizer, options, known_digests=digests, on_progress=check_stop
        )
    except Hang:  # a signal to the whole process group ends the workers too
        check_stop(TokenizeStats())
        raise


def split_sources(
    data: DataConfig, sources: Sequence[DataSource], stores: Sequence[SampleStore | TokenWindows]
) -> Corpus:
    """The parts of a run: validation and test samples are from their files, or split off from each training set."""
    split_off: dict[Use, list[SampleStore | TokenWindows]] = {"valid": [], "test": []}
    fractions: dict[Use, float] = {"valid": data.valid_fraction, "test": data.test_fraction}
    for source, store in zip(sources, stores, strict=True):
        if source.use != "train":
            split_off[source.use], fractions[source.use] = [store], 0.0
    train: list[SampleStore | TokenWindows] = []
    mixture: list[MixtureSet] = []
    for source, store in zip(sources, stores, strict=True):
        if source.use == "train":
            try:
                rest, parts = _split(store, list(fractions.values()), seed=data.seed)
            except UsageError as error:
                raise UsageError(f"{source.name}: {error}") from error
            for use, samples in zip(fractions, parts, strict=True):
                split_off[use] += [samples] if len(samples) else []
            train.append(rest)
            mixture.append(MixtureSet(source.name, len(rest), source.weight))
    valid, test = (_joined(split_off[use]) if split_off[use] else None for use in fractions)
    return Corpus(_joined(train), valid, test, tuple(mixture) if data.sets else ())


def _split(
    store: SampleStore | TokenWindows, fractions: Sequence[float], *, seed: int
) -> tuple[SampleStore | TokenWindows, Sequence[SampleStore | TokenWindows]]:
    return store.split(fractions, seed=seed) if isinstance(store, TokenWindows) else split(store, fractions, seed=seed)


def _joined(stores: Sequence[SampleStore | TokenWindows]) -> SampleStore | TokenWindows:
    """The samples of sets of a kind: either all are windows of large sets, or none."""
    if windows := [store for store in stores if isinstance(store, TokenWindows)]:
        return TokenWindows.joined(windows)
    return SampleStore.concatenated([store for store in stores if isinstance(store, SampleStore)])


def check_fingerprint(saved: str, now: str, checkpoint: Path, files: Sequence[str] = ()) -> None:
    """Check that the data order is that of the checkpoint; ``files`` are those with other content, if known."""
    if saved != now:
        settings = "a setting under data, the tokenizer, train.global_batch_size or the data format of isthmus"
        what = f"the data files (changed: {first_names(files)})" if files else f"the data files, {settings}"
        raise DataError(
            f"{what} differ from those of {checkpoint}, so its step does not match a position in them. Restore them, "
            "or start a new run with --out."
        )
