"""The samples of a data source: prepared files, or those that a run has tokenized into its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.data.chat.conversation_settings import ChatSettings
from isthmus.data.readers.file_sources import first_names
from isthmus.data.store.indexed_dataset import IndexedDataset, indexed_file, open_indexed, scan_indexed, write_manifest
from isthmus.data.store.manifest import MASK
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.store.sample_views import chat_samples, preference_samples, text_samples
from isthmus.data.store.token_windows import TokenWindows, are_many, token_source
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.errors import DataError, UsageError, counted
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_sources import DataSettings, DataSource, Report, tokenizer_record


def open_sources(
    settings: DataSettings,
    sources: Sequence[DataSource],
    folder: Path,
    tokenizer: Tokenizer,
    vocab_size: int,
    report: Report,
    tokenized: dict[str, TokenizeStats],
) -> list[SampleStore | TokenWindows]:
    """The samples of each source; those of training are windows over all documents if one of the sets is large."""
    stores, records = list[SampleStore | TokenWindows](), settings.recipe.records
    large = any(_is_large(source, settings, folder) for source in sources)
    for source in sources:
        store: SampleStore | TokenWindows
        if large and source.use == "train":
            store, fit = _windows(source, settings, tokenizer, folder), TokenizeStats()
        else:
            store, fit = open_samples(source, settings, tokenizer, folder)
        lines: list[str] = []
        if stats := tokenized.get(source.key):
            if records.is_text:  # documents become samples of at most seq_length + 1 tokens here
                loss_tokens = store.num_tokens - len(store)
                stats = replace(stats, samples=len(store), tokens=store.num_tokens, loss_tokens=loss_tokens)
            lines = [stats.summary(records), *stats.notes]
        elif source.prepared:
            samples = f"{counted(len(source.files), 'prepared file')} -> {records.counted(len(store))}"
            lines = [", ".join([samples, counted(store.num_tokens, "token"), *fit.changes()])]
        if isinstance(store, TokenWindows):
            lines.append(f"windows of {store.targets + 1:,} tokens over all documents, because the set is large")
        for line in lines:
            report(f"{source.name}: {line}")
        if not len(store):
            raise DataError(f"{first_names(source.files)}: no sample is left to train on. {'; '.join(lines)}.")
        if store.max_token_id >= vocab_size:
            raise UsageError(
                f"the data contains token {store.max_token_id}, but the model's embedding has {vocab_size} rows. "
                "Use the tokenizer that belongs to the model."
            )
        stores.append(store)
    return stores


def _is_large(source: DataSource, settings: DataSettings, folder: Path) -> bool:
    if source.use != "train" or not settings.recipe.records.is_text or settings.data.max_samples is not None:
        return False
    manifests = [_existing_manifest(source, number, folder) for number in range(len(_prefixes(source, folder)))]
    return are_many([path for path in manifests if path is not None], settings.most_targets)


def _windows(source: DataSource, settings: DataSettings, tokenizer: Tokenizer, folder: Path) -> TokenWindows:
    hashes, opened = tokenizer_record(tokenizer), []
    for number, prefix in enumerate(_prefixes(source, folder)):
        manifest = _existing_manifest(source, number, folder)
        assert manifest is not None, "every prepared file of a run has a manifest"
        tokens, record = token_source(prefix, manifest)
        _check(prefix, record, masked=MASK in record["pair"]["files"], settings=settings, tokenizer_hashes=hashes)
        opened.append(tokens)
    return TokenWindows.from_sources(opened, settings.most_targets)


def _prefixes(source: DataSource, folder: Path) -> tuple[str, ...]:
    return tuple(source.files) if source.prepared else (str(folder / source.key),)


def _existing_manifest(source: DataSource, number: int, folder: Path) -> Path | None:
    """That of a run, or beside the files."""
    paths = (_manifest_path(source, number, folder), indexed_file(_prefixes(source, folder)[number], ".json"))
    return next((path for path in paths if path.is_file()), None)


def open_samples(
    source: DataSource, settings: DataSettings, tokenizer: Tokenizer, folder: Path
) -> tuple[SampleStore, TokenizeStats]:
    """(samples, counts of cut and dropped ones). Raw files are opened from ``folder``, after tokenization;
    prepared files need :func:`write_missing_manifests` first.
    """
    records, tokenizer_hashes = settings.recipe.records, tokenizer_record(tokenizer)
    data, seq_length = settings.data, settings.most_targets
    stores, total = [], TokenizeStats()
    most = data.max_samples if source.prepared and source.use == "train" else None
    for number, prefix in enumerate(_prefixes(source, folder)):
        indexed = open_indexed(prefix, manifest=_existing_manifest(source, number, folder))
        masked = indexed.mask is not None
        _check(prefix, indexed.manifest or {}, masked=masked, settings=settings, tokenizer_hashes=tokenizer_hashes)
        if records.is_text:
            store, fit = text_samples(indexed, seq_length, crosses_documents=data.crosses_documents)
        elif records.roles:
            store, fit = preference_samples(indexed, seq_length, settings.overlong)
        else:
            store, fit = chat_samples(indexed, seq_length, settings.overlong)
        if most is not None:
            store, most = _of_first_documents(store, indexed, most), max(0, most - len(indexed.documents) + 1)
        stores.append(store)
        total.add(fit)
    return SampleStore.concatenated(stores), total


def _of_first_documents(store: SampleStore, indexed: IndexedDataset, count: int) -> SampleStore:
    """The samples that begin in the first ``count`` documents."""
    if count >= len(indexed.documents) - 1:
        return store
    end = indexed.starts[indexed.documents[count]]
    return store.select(np.flatnonzero(store.starts < end))


def write_missing_manifests(source: DataSource, folder: Path) -> bool:
    """Write manifests of indexed files without one into ``folder``; returns whether there were any."""
    missing = [
        (path, file)
        for number, file in enumerate(source.files)
        if not indexed_file(file, ".json").is_file() and not (path := _manifest_path(source, number, folder)).is_file()
    ]
    for path, file in missing:
        write_manifest(path.with_suffix(""), {"pair": scan_indexed(open_indexed(file))})
    return bool(missing)


def _manifest_path(source: DataSource, number: int, folder: Path) -> Path:
    return folder / f"{source.key}-{number}.json"


def _check(
    prefix: str, record: dict[str, Any], *, masked: bool, settings: DataSettings, tokenizer_hashes: dict[str, str]
) -> None:
    """Refuse data of another kind, tokenizer or chat settings; ``record`` is its manifest."""
    expected = settings.recipe.records.name
    kind = record.get("kind", "masked without a manifest" if masked else "text without a manifest")
    if kind.split()[0] != expected:
        why = "" if masked else ", whose mask marks the loss tokens"
        raise DataError(
            f"{prefix}: prepared data of kind {kind}; {settings.recipe.name} needs {expected}{why}. "
            f"Prepare the records with --kind {expected}."
        )
    if "tokenizer" not in record:  # Megatron does not record the tokenizer
        return
    for name, what in (("vocabulary", "tokenizer"), ("template", "chat template")):
        if (name == "vocabulary" or kind != "text") and record["tokenizer"].get(name) != tokenizer_hashes[name]:
            raise DataError(
                f"{prefix}: prepared with another {what} than this model's. Prepare the records with "
                "the tokenizer of the model that is trained."
            )
    try:
        prepared = ChatSettings(**record.get("settings", {}).get("chat", {}))
    except TypeError:  # of another version
        raise DataError(f"{prefix}: prepared with unknown settings of chats. Prepare the records again.") from None
    for name, expected_value in asdict(settings.chat).items() if kind != "text" else ():
        if (got := getattr(prepared, name)) != expected_value:
            raise DataError(
                f"{prefix}: prepared with {name}={got!r}, the run has chat.{name}={expected_value!r}. Prepare "
                "the records again with the settings of the run."
            )
    loss_on = record.get("loss_on", settings.data.loss_on)
    if kind == "chat" and loss_on != settings.data.loss_on:
        raise DataError(
            f"{prefix}: prepared with loss_on={loss_on}, the run has data.loss_on={settings.data.loss_on}. "
            f"Prepare the records again, or set data.loss_on={loss_on}."
        )
