"""The file and the record that a sample of a store comes from."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from isthmus.data.store.answer_views import ScoredSamples
from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.data.store.sample_store import Samples, SampleStore
from isthmus.data.store.token_windows import TokenWindows
from isthmus.errors import IsthmusError


def sample_origin(store: Samples | None, index: int) -> dict[str, Any]:
    """``file`` and ``record`` (from 1) of the raw data, or the indexed file and the number of the ``sequence`` in it.

    The record is known if the sequences are of one file of which no record was skipped or dropped. Empty for samples in
    memory, random tokens and files that cannot be read now.
    """
    if isinstance(store, ScoredSamples):
        store = store.store
    if isinstance(store, TokenWindows):
        source, window = store.place(index)
        return {"file": str(source.file), "window": window}
    if not isinstance(store, SampleStore):
        return {}
    source = store.sources[int(store.which[index])]
    if source.file is None:
        return {}
    with suppress(IsthmusError, OSError, LookupError, TypeError):
        indexed = open_indexed(str(source.file).removesuffix(".bin"))
        sequence = int(np.searchsorted(indexed.starts, store.starts[index], side="right")) - 1
        record = int(np.searchsorted(indexed.documents, sequence, side="right"))
        manifest = indexed.manifest or {}
        files, report = manifest.get("files", ()), manifest.get("report", {})
        if len(files) == 1 and report.get("records") == len(indexed.documents) - 1:
            return {"file": files[0]["name"], "record": record}
        return {"file": str(source.file), "sequence": sequence}
    return {"file": str(source.file)}
