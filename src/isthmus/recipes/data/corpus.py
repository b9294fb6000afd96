"""A run's data: tokenized once, by one rank, into the run folder; the others map it into memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from isthmus.atomic_write import write_atomic
from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches, BatchSettings, BatchShard
from isthmus.data.batching.pair_batches import PairBatches
from isthmus.data.readers.field_mapping import check_columns
from isthmus.data.store.mixture import MixtureSet
from isthmus.data.store.mock_data import MockSamples
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.store.samples import Samples
from isthmus.data.store.split import split
from isthmus.data.tokenize.tokenize_files import TokenizeStats
from isthmus.engine.parallel.process_groups import Position, agree, once
from isthmus.errors import DataError, UsageError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_fingerprint import DataFingerprint, read_fingerprint
from isthmus.recipes.data.data_sources import DataSource, Use, find_data_sources
from isthmus.recipes.data.prepared_data import open_part, survey_part

Prepare = Callable[[list[Path]], tuple[SampleStore, TokenizeStats]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out samples."""

    train: Samples
    valid: Samples | None
    test: Samples | None = None
    shares: tuple[MixtureSet, ...] = ()
    """The sets that ``train`` is a mix of; empty when it is one."""

    @classmethod
    def made_up(cls, config: RunConfig, vocab_size: int) -> Corpus:
        """Mock data; held-out parts are as large as their fractions of the samples that the run takes."""

        def held_out(part: Literal["valid", "test"], fraction: float) -> MockSamples | None:
            taken = (config.train.steps or 0) * config.train.global_batch_size
            return make(part=part, count=max(1, round(fraction * taken))) if fraction else None

        data = config.data
        make = partial(MockSamples, seq_length=data.seq_length, vocab_size=vocab_size, seed=data.seed)
        return cls(make(), held_out("valid", data.valid_fraction), held_out("test", data.test_fraction))

    def fingerprint(self, config: RunConfig) -> str:
        """Equal when step k of two runs takes the same sequences."""
        data = config.data
        order: list[Any] = [self.train.digest(), data.seq_length, data.packing, data.seed]
        order += [config.train.global_batch_size, [[share.samples, share.weight] for share in self.shares]]
        return hashlib.blake2b(json.dumps(order).encode(), digest_size=16).hexdigest()

    def batches(self, config: RunConfig, position: Position, dp: int) -> tuple[Batches, Batches | None, Batches | None]:
        """The batches of this rank for training, validation and test."""
        settings = BatchSettings(
            seq_length=config.data.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            packing=config.data.packing,
            seed=config.data.seed,
            shuffle=not config.data.mock,  # mock samples are random already
            length_buckets=config.data.length_buckets,
        )
        shard = BatchShard(
            dp_rank=position.dp_rank,
            dp_size=dp,
            pad_to_multiple_of=config.parallel.line_multiple,
            # The interleaved pipeline schedule runs micro batches in rounds of pp.
            micro_batches_multiple_of=config.parallel.pp if config.parallel.vpp > 1 else 1,
        )
        kind = PairBatches if config.recipe == "dpo" else Batches

        def in_order(samples: Samples | None) -> Batches | None:
            return None if samples is None else kind(samples, replace(settings, shuffle=False), shard)

        return kind(self.train, settings, shard, shares=self.shares), in_order(self.valid), in_order(self.test)


def check_files(config: RunConfig) -> None:
    """See that the data files are there, before the long work of loading a model.

    Raises:
        MissingInput: naming the first that is not.
        UsageError: a folder has no data file in it, data.columns renames to what nothing reads, or raw files and
            prepared ones are mixed in one set.
    """
    find_data_sources(config)
    check_columns(config.data.columns)


def load_corpus(
    config: RunConfig,
    folder: Path,
    tokenizer: Tokenizer,
    prepare: Prepare,
    *,
    vocab_size: int,
    resume: Path | None,
    say: Callable[[str], None],
) -> Corpus:
    """Tokenize the data files into ``folder`` unless that was done before from the same files in the same way.

    Mock data needs no folder.

    Args:
        config: names the files.
        folder: of the run.
        tokenizer: its vocabulary and chat template are part of what "the same way" means.
        prepare: files to samples.
        vocab_size: rows of the model's embedding.
        resume: the checkpoint that the run goes on from, None for a fresh start.
        say: told what was found in the files.

    Raises:
        MissingInput, DataError: a data file is absent or bad, nothing is left to learn from, or the data of a run
            that goes on is not what it began with.
        UsageError: the tokenizer knows more tokens than the model.
    """

    if config.data.mock:
        say(f"data: random tokens, {config.data.seq_length} a sample")
        return Corpus.made_up(config, vocab_size)

    parts = find_data_sources(config)

    def make() -> None:
        marker = folder / "source.json"
        origin = DataFingerprint.of(config, parts, tokenizer, read_fingerprint(marker))
        if origin.unchanged:
            say(f"data: {folder} was made from the same files before; taken as it is")
            return
        if marker.is_file() and resume is not None:
            raise _changed(resume)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for part in parts:
            if part.prepared:
                if survey_part(part, folder):
                    say(f"{part.name}: read once, since there is no manifest that tells of its tokens")
                continue
            store, report = prepare([Path(file) for file in part.files])
            for line in [report.line(), *report.notes]:
                say(f"{part.name}: {line}")
            _check_vocabulary(store, vocab_size)
            store.save(folder / part.key)
        write_atomic(marker, json.dumps(origin.record))

    once(make, "corpus")
    opened: dict[str, SampleStore] = {}

    def open_parts() -> None:
        for part in parts:
            opened[part.key] = _open(part, config, tokenizer, folder, say)
            _check_vocabulary(opened[part.key], vocab_size)

    agree(open_parts)
    return _divided(config, parts, opened)


def _open(
    part: DataSource, config: RunConfig, tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]
) -> SampleStore:
    if not part.prepared:
        return SampleStore.open(folder / part.key)
    store, left = open_part(part, config, tokenizer, folder)
    said = [f"{len(part.files)} prepared -> {len(store)} samples, {store.num_tokens} tokens", *([left] if left else [])]
    say(f"{part.name}: {', '.join(said)}")
    if not len(store):
        raise DataError(f"{', '.join(part.files)}: no sample is left to train on. {'; '.join(said)}.")
    return store


def _divided(config: RunConfig, parts: Sequence[DataSource], stores: dict[str, SampleStore]) -> Corpus:
    """Training samples, and what is held out of each set unless there are files for it."""
    data = config.data
    held: dict[Use, list[SampleStore]] = {"valid": [], "test": []}
    fractions: dict[Use, float] = {"valid": data.valid_fraction, "test": data.test_fraction}
    for part in parts:
        if part.use != "train":
            held[part.use], fractions[part.use] = [stores[part.key]], 0.0
    learned: list[SampleStore] = []
    shares: list[MixtureSet] = []
    for part in parts:
        if part.use == "train":
            try:
                store, apart = split(stores[part.key], list(fractions.values()), seed=data.seed)
            except UsageError as error:
                raise UsageError(f"{part.name}: {error}") from error
            for use, samples in zip(fractions, apart, strict=True):
                held[use] += [samples] if len(samples) else []
            learned.append(store)
            shares.append(MixtureSet(part.name, len(store), part.weight))
    valid, test = (SampleStore.concatenated(held[use]) if held[use] else None for use in fractions)
    return Corpus(SampleStore.concatenated(learned), valid, test, tuple(shares) if data.sets else ())


def _check_vocabulary(store: SampleStore, vocab_size: int) -> None:
    if store.max_token_id >= vocab_size:
        raise UsageError(
            f"the data holds token {store.max_token_id}, but the model's embedding has {vocab_size} rows. "
            "Use the tokenizer that belongs to the model."
        )


def check_fingerprint(saved: str, now: str, checkpoint: Path) -> None:
    """Refuse to go on in data that is not what the checkpoint's position counts.

    Raises:
        DataError: the data, its order or the batch size changed.
    """
    if saved != now:
        raise _changed(checkpoint)


def _changed(checkpoint: Path) -> DataError:
    return DataError(
        f"the data files, a setting under data, the tokenizer, train.global_batch_size or the form of isthmus' data "
        f"differ from those of {checkpoint}, so its position means nothing in them. Restore them, or start a new run "
        "with --out."
    )
