"""Prepared pairs as samples, if they were made for such a run as this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.data.chat.chat_records import RECIPES
from isthmus.data.store.indexed_dataset import IndexedDataset, indexed_file, open_indexed, scan_indexed, write_manifest
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.store.sample_views import FitStats, chat_samples, preference_samples, text_samples
from isthmus.errors import DataError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_fingerprint import tokenizer_record
from isthmus.recipes.data.data_sources import DataSource

_KINDS = {recipe: kind for kind, recipe in RECIPES.items()}


def survey_part(part: DataSource, folder: Path) -> bool:
    """Read pairs that have no manifest once, and write one into the run's ``folder``; tells whether there was one."""
    unknown = [(k, file) for k, file in enumerate(part.files) if not indexed_file(file, ".json").is_file()]
    for number, file in unknown:
        write_manifest(folder / f"{part.key}-{number}", {"pair": scan_indexed(open_indexed(file))})
    return bool(unknown)


def open_part(part: DataSource, config: RunConfig, tokenizer: Tokenizer, folder: Path) -> tuple[SampleStore, str]:
    """(the samples of a part's pairs, what became of those that did not fit), after :func:`survey_part`.

    Raises:
        MissingInput, DataError: a pair is not whole, of another kind, or made with another tokenizer.
    """
    mine = tokenizer_record(tokenizer)
    stores, left = [], FitStats()
    for number, file in enumerate(part.files):
        own = folder / f"{part.key}-{number}.json"
        pair = open_indexed(file, manifest=own if own.is_file() else None)
        _check(pair, config, mine)
        if config.recipe == "pretrain":
            store, out = text_samples(pair, config.data.seq_length)
        elif config.recipe == "sft":
            store, out = chat_samples(pair, config.data.seq_length, config.data.overlong)
        else:
            store, out = preference_samples(pair, config.data.seq_length, config.data.overlong)
        stores.append(store)
        left += out
    return SampleStore.concatenated(stores), left.words()


def _check(pair: IndexedDataset, config: RunConfig, mine: dict[str, str]) -> None:
    record: dict[str, Any] = pair.manifest or {}
    wanted = _KINDS[config.recipe]
    kind = record.get("kind", "text without a manifest" if pair.mask is None else "masked without a manifest")
    if kind.split()[0] != wanted:
        why = ", which says which tokens are learned" if pair.mask is None else ""
        raise DataError(
            f"{pair.prefix}: a prepared pair of kind {kind}; {config.recipe} wants {wanted}{why}. "
            f"Prepare the records with --kind {wanted}."
        )
    if "tokenizer" not in record:  # made by Megatron, which does not write down with what
        return
    for name, what in (("vocabulary", "tokenizer"), ("template", "chat template")):
        if (name == "vocabulary" or kind != "text") and record["tokenizer"].get(name) != mine[name]:
            raise DataError(
                f"{pair.prefix}: prepared with another {what} than this model's. Prepare the records with "
                "the tokenizer of the model that is trained."
            )
    learned = record.get("loss_on", config.data.loss_on)
    if kind == "chat" and learned != config.data.loss_on:
        raise DataError(
            f"{pair.prefix}: prepared with loss_on={learned}, the run says data.loss_on={config.data.loss_on}. "
            f"Prepare the records again, or set data.loss_on={learned}."
        )
