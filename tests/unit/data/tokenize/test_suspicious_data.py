"""Data that would train another model than meant is refused, or reported with counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.data.chat.chat_records import kinds_of
from isthmus.data.chat.chat_templates import find_template
from isthmus.data.chat.conversation_settings import ChatSettings
from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.data.store.sample_views import chat_samples, preference_samples
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.errors import DataError, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.prepare import tokenize_files
from unit.data.records import write_records
from unit.data.tokenized import loss_text, num_loss_tokens, tokenized

RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "sea"},
    "chat": {"prompt": "q", "completion": "a"},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "unpaired": {"prompt": "q", "completion": "a", "label": True},
    "undesirable": {"prompt": "q", "completion": "a", "label": False},
}
TAKEN = {("unpaired", "chat"), ("preference", "unpaired"), ("undesirable", "unpaired")}


@pytest.mark.parametrize("kind", ["text", "chat", "preference", "unpaired"])
@pytest.mark.parametrize("name", RECORDS)
def test_records_of_another_kind_are_refused(name, kind, tmp_path, tokenizer):
    file = write_records(tmp_path / "a.jsonl", RECORDS[name])
    if kind == name or (name, kind) in TAKEN:
        assert len(tokenized(kind, [file], tokenizer, 64)[0])
        return
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*( among data of kind |Train with isthmus kto)"):
        tokenized(kind, [file], tokenizer, 64)


@pytest.mark.parametrize("label", [False, 0, 0.0, "false", "False", "0"])
@pytest.mark.parametrize("field", ["label", "kto_tag"])
def test_undesirable_answers_are_not_learned_as_right(label, field, tmp_path, tokenizer):
    good, bad = ({"instruction": "q", "output": answer} for answer in ("good", "bad"))
    file = write_records(tmp_path / "a.jsonl", good | {field: True}, bad | {field: label})
    assert kinds_of(Record(bad | {field: label}, ""))[0] == "unpaired"
    with pytest.raises(DataError, match=r"a\.jsonl:2: label false marks an answer that is not desirable"):
        tokenized("chat", [file], tokenizer, 64)
    store, stats = tokenized("chat", [file], tokenizer, 64, on_error="skip")
    assert (len(store), stats.skipped.count) == (1, 1)
    assert loss_text(store, 0, tokenizer) == "good<|im_end|>"
    assert tokenized("unpaired", [file], tokenizer, 64)[0].values.tolist() == [1.0, 0.0]


def test_turns_that_end_with_the_rejected_answer_are_refused(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"}]
    file = write_records(tmp_path / "a.jsonl", {"messages": turns, "chosen": "good", "rejected": "bad"})
    with pytest.raises(DataError, match="end with the rejected answer"):
        tokenized("chat", [file], tokenizer, 64)
    file = write_records(tmp_path / "b.jsonl", {"messages": turns, "chosen": "bad", "rejected": "worse"})
    assert len(tokenized("chat", [file], tokenizer, 64)[0]) == 1


def test_notes_on_empty_answers_unused_fields_and_few_samples(tmp_path, tokenizer):
    good = {"prompt": "q", "completion": "a", "sytem": "s", "id": 1}
    file = write_records(tmp_path / "a.jsonl", good, good, {"prompt": "q", "completion": " ", "id": 2})
    _, stats = tokenized("chat", [file], tokenizer, 64)
    assert stats.notes == [
        "1 answers are empty, so the model learns to answer nothing",
        "fields that are not used: id (3), sytem (2)",
    ]
    long = {"prompt": "q" * 200, "completion": "a"}
    _, stats = tokenized("chat", [write_records(tmp_path / "b.jsonl", long, long, good)], tokenizer, 64)
    assert stats.notes[0] == "most of the data is left out: 2 of 3 records have no sample"


def test_long_samples_are_split_or_an_error(tmp_path, tokenizer):
    file = write_records(tmp_path / "a.jsonl", {"prompt": "q" * 50, "completion": "abc" * 40}, RECORDS["chat"])
    full, _ = tokenized("chat", [file], tokenizer, 4096)
    store, stats = tokenized("chat", [file], tokenizer, 32, overlong="split")
    assert (stats.split_overlong, stats.truncated, int(store.lengths.max())) == (1, 0, 33)
    assert num_loss_tokens(store) == num_loss_tokens(full)
    assert len(np.unique(store.groups)) == 2  # the parts of a chat are validation data together, or none is
    with pytest.raises(DataError, match=r"a\.jsonl:1: a sample of \d+ tokens, more than seq_length=32"):
        tokenized("chat", [file], tokenizer, 32, overlong="error")
    for kind in ("preference", "unpaired"):
        with pytest.raises(UsageError, match="overlong=split is for chats"):
            tokenized(kind, [file], tokenizer, 32, overlong="split")


def test_long_samples_of_prepared_files_are_split_or_an_error(tmp_path, tokenizer):
    records = [{"prompt": "q" * 50, "completion": "abc" * 40}, RECORDS["chat"]]
    files, options = find_sources([write_records(tmp_path / "a.jsonl", *records)]), TokenizeOptions("chat")
    tokenize_files(files, tmp_path / "out", tokenizer, options, workers=1, method="spawn")
    indexed = open_indexed(tmp_path / "out")
    store, fit = chat_samples(indexed, 32, "split")
    raw, _ = tokenized("chat", files.names, tokenizer, 32, overlong="split")
    assert (fit.split_overlong, len(store)) == (1, len(raw))
    for k in range(len(raw)):
        assert [part.tolist() for part in store[k]] == [part.tolist() for part in raw[k]]
    with pytest.raises(DataError, match="more than seq_length=32"):
        chat_samples(indexed, 32, "error")
    pairs = [{"prompt": "q", "chosen": "a" * 90, "rejected": "b"}]
    files, options = find_sources([write_records(tmp_path / "p.jsonl", *pairs)]), TokenizeOptions("preference")
    tokenize_files(files, tmp_path / "pairs", tokenizer, options, workers=1, method="spawn")
    with pytest.raises(DataError, match="more than seq_length=32"):
        preference_samples(open_indexed(tmp_path / "pairs"), 32, "error")


def test_cost_of_splitting_by_turn_and_one_sample_instead(tmp_path):
    tokenizer = Tokenizer(train_tokenizer(["sea"], vocab_size=280, chat_template=find_template("qwen3")[0]))
    turns = []
    for k in range(3):
        answer = {"role": "assistant", "content": f"answer{k}", "reasoning_content": f"thought{k}"}
        turns += [{"role": "user", "content": f"question{k}"}, answer]
    file = write_records(tmp_path / "a.jsonl", {"messages": turns}, RECORDS["chat"])
    split, stats = tokenized("chat", [file], tokenizer, 4096)
    assert (len(split), stats.split_records) == (4, 1)
    texts = [loss_text(split, k, tokenizer) for k in range(3)]
    assert texts == [f"<think>\nthought{k}\n</think>\n\nanswer{k}<|im_end|>" for k in range(3)]
    full, whole_stats = tokenized("chat", [file], tokenizer, 4096, chat=ChatSettings(split_turns=False))
    assert (len(full), whole_stats.split_records, whole_stats.notes) == (2, 0, [])
    assert loss_text(full, 0, tokenizer) == "answer0<|im_end|>answer1<|im_end|>" + texts[2]
    assert stats.split_tokens == int(split.lengths[:3].sum()) > stats.unsplit_tokens == int(full.lengths[0])
    assert (
        f"{stats.split_tokens:,} tokens instead of {stats.unsplit_tokens:,}. chat.split_turns=false" in stats.notes[0]
    )
