"""Records with labels, and pairs, become answers with values; values survive files, selection and resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.data.chat.preference_records import parse_labelled, parse_preference
from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import open_indexed, scan_indexed
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.errors import DataError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.prepare import tokenize_files
from unit.data.records import write_records
from unit.data.tokenized import loss_text, tokenized

Q = {"role": "user", "content": "q"}
A, B = ({"role": "assistant", "content": words} for words in ("a", "b"))


def parse(value: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    result = parse_labelled(Record(value, "a.jsonl:3"))
    return result.prompt, result.answers


@pytest.mark.parametrize(
    ("value", "prompt", "answers"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, [Q], [([A], True)]),
        ({"prompt": [Q], "completion": [A], "label": 0}, [Q], [([A], False)]),
        ({"instruction": "q", "output": "a", "label": "False"}, [Q], [([A], False)]),
        ({"messages": [Q, A, Q, B], "label": True}, [Q, A, Q], [([B], True)]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [Q], [([A], True), ([B], False)]),
    ],
)
def test_records_with_labels(value: dict[str, Any], prompt: list[Any], answers: list[Any]) -> None:
    assert parse(value) == (prompt, answers)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"prompt": "q", "completion": "a", "label": "good"}, "label must be true .*got 'good'"),
        ({"prompt": "q", "completion": "a"}, "label must be true .*got nothing"),
        ({"messages": [A], "label": True}, "expected a user turn"),
        ({"messages": [A, Q], "label": True}, "got user last"),
        ({"text": "q", "label": True}, "got plain text"),
    ],
)
def test_bad_records(value: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=f"a.jsonl:3: .*{why}"):
        parse(value)


@pytest.mark.parametrize("margin", [True, "much", float("nan"), [1]])
def test_margins_must_be_numbers(margin: Any) -> None:
    with pytest.raises(DataError, match="margin must be a number"):
        parse_preference(Record({"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin}, "a:1"))


def test_answers_have_their_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = {"prompt": "r", "chosen": "blue", "rejected": "wide"}
    file = write_records(tmp_path / "a.jsonl", {"prompt": "q", "completion": "yes", "label": False}, pair)
    store, _ = tokenized("unpaired", [file], tokenizer, 64)
    assert [loss_text(store, k, tokenizer) for k in range(3)] == [f"{a}<|im_end|>" for a in ("yes", "blue", "wide")]
    assert store.values.tolist() == [0, 1, 0] and store.groups.tolist() == [0, 1, 1]
    assert store.select([2, 1]).truncate(5).values.tolist() == [0, 1]
    assert SampleStore.concatenated([store, store]).values.tolist() == [0, 1, 0] * 2
    file = write_records(tmp_path / "b.jsonl", pair | {"margin": 0.25}, pair)
    assert tokenized("preference", [file], tokenizer, 64)[0].values.tolist() == [0.25, 0.25, 0, 0]
    file = write_records(tmp_path / "c.jsonl", {"prompt": "q", "completion": "yes"})
    with pytest.raises(DataError, match=r"a chat record among data of kind unpaired\. Expected an answer with a label"):
        tokenized("unpaired", [file], tokenizer, 64)


def test_values_are_a_file_of_their_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = {"prompt": "r", "chosen": "blue", "rejected": "wide"}
    for name, records in (("without", [pair]), ("with", [pair, pair | {"margin": 2}])):
        files = find_sources([write_records(tmp_path / f"{name}.jsonl", *records)])
        options = TokenizeOptions("preference", 64)
        tokenize_files(files, tmp_path / name, tokenizer, options, workers=1, method="spawn")
    assert open_indexed(tmp_path / "without").values is None and not (tmp_path / "without.values.bin").exists()
    opened = open_indexed(tmp_path / "with", verify=True)
    assert opened.values is not None and opened.values.tolist() == [0, 0, 2, 2]
    assert scan_indexed(opened) == (opened.manifest or {})["pair"]
    assert open_indexed(str(tmp_path / "with")).values is not None
    (tmp_path / "with.json").unlink()
    np.zeros(3, dtype="<f4").tofile(tmp_path / "with.values.bin")
    with pytest.raises(DataError, match="3 values, expected 4"):
        open_indexed(tmp_path / "with")
