"""A run's data: tokenized once, by one rank, into the run folder; the others map it into memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from isthmus.config.schema import RunConfig
from isthmus.data.batches import Batches
from isthmus.data.mock import MockSamples
from isthmus.data.prepare import PrepareReport, split_validation
from isthmus.data.samples import Samples
from isthmus.data.store import SampleStore
from isthmus.engine.groups import Position, once
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tokenizer import Tokenizer
from isthmus.recipes.origin import Origin, read_origin

Prepare = Callable[[list[Path]], tuple[SampleStore, PrepareReport]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out samples."""

    train: Samples
    valid: Samples | None

    @classmethod
    def made_up(cls, config: RunConfig, vocab_size: int) -> Corpus:
        """Mock data; ``data.valid_fraction`` is of the samples that the run takes."""

        def held_out(part: Literal["valid", "test"], fraction: float) -> MockSamples | None:
            taken = (config.train.steps or 0) * config.train.global_batch_size
            return make(part=part, count=max(1, round(fraction * taken))) if fraction else None

        data = config.data
        make = partial(MockSamples, seq_length=data.seq_length, vocab_size=vocab_size, seed=data.seed)
        return cls(make(), held_out("valid", data.valid_fraction))

    def fingerprint(self, config: RunConfig) -> str:
        """Equal when step k of two runs takes the same sequences."""
        data = config.data
        order = [self.train.digest(), data.seq_length, data.packing, data.seed, config.train.global_batch_size]
        return hashlib.blake2b(json.dumps(order).encode(), digest_size=16).hexdigest()

    def batches(self, config: RunConfig, position: Position, dp: int) -> tuple[Batches, Batches | None]:
        """The lines of this rank, for training and for held-out loss."""
        settings: dict[str, Any] = {
            "seq_length": config.data.seq_length,
            "micro_batch_size": config.train.micro_batch_size,
            "global_batch_size": config.train.global_batch_size,
            "packing": config.data.packing,
            "seed": config.data.seed,
            "dp_rank": position.dp_rank,
            "dp_size": dp,
            "pad_to_multiple_of": config.parallel.line_multiple,
            # Micro batches take turns on virtual stages, in rounds of one for each rank of the pipeline.
            "micro_batches_multiple_of": config.parallel.pp if config.parallel.vpp > 1 else 1,
            "length_buckets": config.data.length_buckets,
        }
        held_out = None if self.valid is None else Batches(self.valid, shuffle=False, **settings)
        # Samples that are drawn at random are in no order that could be shuffled.
        return Batches(self.train, shuffle=not config.data.mock, **settings), held_out


def check_files(config: RunConfig) -> None:
    """See that the data files are there, before the long work of loading a model.

    Raises:
        MissingInput: naming the first that is not.
    """
    for name in [*config.data.files, *config.data.valid_files]:
        if not Path(name).exists():
            raise MissingInput(f"{name}: no such data file.")


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

    def make() -> None:
        marker = folder / "source.json"
        origin = Origin.of(config, tokenizer, read_origin(marker))
        if origin.unchanged:
            say(f"data: {folder} was made from the same files before; taken as it is")
            return
        if marker.is_file() and resume is not None:
            raise _changed(resume)
        shutil.rmtree(folder, ignore_errors=True)
        store, report = prepare([Path(file) for file in config.data.files])
        for line in [report.line(), *report.notes]:
            say(f"data: {line}")
        valid: SampleStore | None = None
        if config.data.valid_files:
            valid, held_out = prepare([Path(file) for file in config.data.valid_files])
            say(f"held out: {held_out.line()}")
        elif config.data.valid_fraction > 0:
            store, valid = split_validation(store, fraction=config.data.valid_fraction, seed=config.data.seed)
        _check_vocabulary(store, vocab_size)
        store.save(folder / "train")
        if valid is not None:
            _check_vocabulary(valid, vocab_size)
            valid.save(folder / "valid")
        marker.write_text(json.dumps(origin.record))

    once(make, "corpus")
    has_valid = bool(config.data.valid_files) or config.data.valid_fraction > 0
    return Corpus(SampleStore.open(folder / "train"), SampleStore.open(folder / "valid") if has_valid else None)


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
        f"the data files, a setting under data, the tokenizer or train.global_batch_size differ from those of "
        f"{checkpoint}, so its position means nothing in them. Restore them, or start a new run with --out."
    )
