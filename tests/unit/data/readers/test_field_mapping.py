"""Odd names of fields are mapped to the known ones; a mapping that does not fit the data is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.data.readers.chunks import Record, SkippedRecords
from isthmus.data.readers.file_formats import rename_fields
from isthmus.errors import DataError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from unit.data.records import read_records
from unit.data.tokenized import tokenized


def test_fields_are_renamed() -> None:
    record = Record({"q": "1", "completion": "2", "text": "old", "id": 3}, "f:1")
    value = rename_fields(record, {"prompt": "completion", "completion": "q", "text": "q"}).value
    assert value == {"prompt": "2", "completion": "1", "text": "1", "id": 3}


def test_missing_field_is_reported_with_line_and_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n\n{"bodi": "x"}\n')
    with pytest.raises(DataError) as caught:
        list(read_records(path, columns={"text": "body"}))
    assert str(caught.value) == f"{path}:3: no field body, which data.columns names for text. Did you mean text: bodi?"
    skipped = SkippedRecords()
    assert len(list(read_records(path, on_error="skip", skipped=skipped, columns={"text": "body"}))) == 1
    assert skipped.count == 1


def test_columns_reach_the_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "the sea"}))
    (tmp_path / "notes.md").write_text("not data")
    tokenizer = Tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=270))
    store, stats = tokenized("text", [tmp_path], tokenizer, 64, columns={"text": "body"})
    assert tokenizer.decode(store[0][0].tolist()).startswith("the sea")
    assert stats.notes == [
        f"1 files in the data folders are ignored, since their names are not of data: {tmp_path / 'notes.md'}"
    ]
