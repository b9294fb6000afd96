"""Preference records to pairs of samples: what is learned of them, and what is left out with its pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.data.chat.chat_records import PreferenceRecord
from isthmus.data.chat.chat_text import AnswerRenderer
from isthmus.errors import DataError, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from unit.data.tokenized import loss_text, num_loss_tokens, tokenized


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=270))


def write(path: Path, *pairs: tuple[str, str, str]) -> Path:
    lines = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_pair_is_two_samples_in_one_group(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", ("q", "yes", "no"), ("r", "blue", "wide"))
    store, stats = tokenized("preference", [file], tokenizer, 64)
    assert [loss_text(store, k, tokenizer) for k in range(4)] == [
        f"{a}<|im_end|>" for a in ("yes", "no", "blue", "wide")
    ]
    first, second = (tokens[~mask.astype(bool)].tolist() for tokens, mask in (store[0], store[1]))
    assert first == second  # the prompt
    assert store.groups[::2].tolist() == store.groups[1::2].tolist() and len(set(store.groups.tolist())) == 2
    assert (stats.records, stats.samples, stats.loss_tokens) == (2, 4, num_loss_tokens(store))


def test_assistant_turns_of_the_prompt_have_no_loss(tokenizer: Tokenizer) -> None:
    def said(*answers: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": answer} for answer in answers]

    prompt = [{"role": "user", "content": "a"}, *said("earlier"), {"role": "user", "content": "b"}]
    pair = PreferenceRecord(prompt, said("good"), said("bad"), None, "here:1")
    for text, answer in zip(AnswerRenderer(tokenizer)(pair), ("good", "bad"), strict=True):
        ((start, end),) = text.loss_spans
        assert text.text[start:end] == f"{answer}<|im_end|>" and "earlier" in text.text[:start]
    silent = PreferenceRecord(prompt, said("good"), [said("bad")[0] | {"weight": 0}], None, "here:1")
    with pytest.raises(DataError, match="here:1: an answer has no assistant turn with loss"):
        AnswerRenderer(tokenizer)(silent)


def test_pairs_are_dropped_as_a_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [("q", "x" * 100, "no"), ("y" * 100, "yes", "no"), ("q", "same", "same"), ("q", "x" * 100, "x" * 99)]
    file = write(tmp_path / "a.jsonl", *pairs, ("q", "yes", "no"))
    store, stats = tokenized("preference", [file], tokenizer, 40)
    assert (len(store), int(store.lengths.max())) == (4, 41)
    assert set(loss_text(store, 0, tokenizer)) == {"x"}
    # The prompt alone is too long; both are the same; both are the same once they are cut.
    assert (stats.truncated, stats.dropped_without_loss) == (1, 3)
    store, stats = tokenized("preference", [file], tokenizer, 40, overlong="drop")
    assert (len(store), stats.dropped_overlong, stats.dropped_without_loss) == (2, 3, 1)


def test_bad_records_stop_or_are_skipped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", ("q", "yes", "no"))
    with file.open("a") as handle:
        handle.write('{"instruction": "q", "output": "a"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: a chat record among data of kind preference"):
        tokenized("preference", [file], tokenizer, 40)
    store, stats = tokenized("preference", [file], tokenizer, 40, on_error="skip")
    assert (len(store), stats.skipped.count) == (2, 1)
    with pytest.raises(DataError, match=r"no sample is left to train on .*First: .*a\.jsonl:2"):
        tokenized("preference", [file], tokenizer, 1, on_error="skip")
    with pytest.raises(UsageError, match=r"seq_length=0"):
        tokenized("preference", [file], tokenizer, 0)
