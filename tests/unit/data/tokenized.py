"""Tokenizes files as a run does, and returns samples and stats."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.data.chat.chat_records import Kind
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.store.sample_views import chat_samples, preference_samples, text_samples
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.prepare import tokenize_files


def tokenized(
    kind: Kind, files: Sequence[Path], tokenizer: Tokenizer, seq_length: int, **options: Any
) -> tuple[SampleStore, TokenizeStats]:
    """The samples of ``files`` and the stats on them; the indexed files stay mapped after they are removed."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "out"
        chosen = TokenizeOptions(kind, None if kind == "text" else seq_length, **options)
        stats = tokenize_files(find_sources(files), prefix, tokenizer, chosen, workers=1, method="spawn")
        indexed = open_indexed(prefix)
        if kind == "text":
            return text_samples(indexed, seq_length)[0], stats
        view = preference_samples if kind == "preference" else chat_samples
        return view(indexed, seq_length, "truncate")[0], stats


def loss_text(store: SampleStore, index: int, tokenizer: Tokenizer) -> str:
    """The text of a sample's tokens with loss."""
    tokens, mask = store[index]
    return tokenizer.decode(tokens[mask.astype(bool)].tolist())


def num_loss_tokens(store: SampleStore) -> int:
    """Targets with loss of all samples."""
    return sum(int(store[k][1][1:].sum()) for k in range(len(store)))
