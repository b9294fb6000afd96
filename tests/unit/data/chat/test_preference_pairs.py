"""Preference records to pairs of samples: what is learned of them, and what is left out with its pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.data.chat.chat_records import PreferenceRecord
from isthmus.data.chat.preference_pairs import PairRenderer
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_files import prepare_pairs
from isthmus.errors import DataError, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=270))


def write(path: Path, *pairs: tuple[str, str, str]) -> Path:
    lines = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def learned(store: SampleStore, index: int, tokenizer: Tokenizer) -> str:
    tokens, mask = store[index]
    return tokenizer.decode(tokens[mask.astype(bool)].tolist())


def test_a_pair_is_two_samples_in_one_group(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", ("q", "yes", "no"), ("r", "blue", "wide"))
    store, report = prepare_pairs([file], tokenizer, seq_length=64)
    assert [learned(store, k, tokenizer) for k in range(4)] == [f"{a}<|im_end|>" for a in ("yes", "no", "blue", "wide")]
    first, second = (tokens[~mask.astype(bool)].tolist() for tokens, mask in (store[0], store[1]))
    assert first == second  # the prompt
    assert store.groups[::2].tolist() == store.groups[1::2].tolist() and len(set(store.groups.tolist())) == 2
    assert (report.records, report.samples, report.learned_tokens) == (2, 4, store.num_learned)


def test_answers_in_the_prompt_are_not_learned(tokenizer: Tokenizer) -> None:
    def said(*answers: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": answer} for answer in answers]

    prompt = [{"role": "user", "content": "a"}, *said("earlier"), {"role": "user", "content": "b"}]
    pair = PreferenceRecord(prompt, said("good"), said("bad"), None, "here:1")
    for text, answer in zip(PairRenderer(tokenizer)(pair), ("good", "bad"), strict=True):
        ((start, end),) = text.learned
        assert text.text[start:end] == f"{answer}<|im_end|>" and "earlier" in text.text[:start]
    silent = PreferenceRecord(prompt, said("good"), [said("bad")[0] | {"weight": 0}], None, "here:1")
    with pytest.raises(DataError, match="here:1: an answer has no turn of the assistant that counts"):
        PairRenderer(tokenizer)(silent)


def test_what_is_left_out_takes_its_pair_along(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [("q", "x" * 100, "no"), ("y" * 100, "yes", "no"), ("q", "same", "same"), ("q", "x" * 100, "x" * 99)]
    file = write(tmp_path / "a.jsonl", *pairs, ("q", "yes", "no"))
    store, report = prepare_pairs([file], tokenizer, seq_length=40)
    assert (len(store), int(store.lengths.max())) == (4, 41)
    assert set(learned(store, 0, tokenizer)) == {"x"}
    # The prompt alone is too long; both are the same; both are the same once they are cut.
    assert (report.truncated, report.dropped_nothing_to_learn) == (1, 3)
    store, report = prepare_pairs([file], tokenizer, seq_length=40, overlong="drop")
    assert (len(store), report.dropped_overlong, report.dropped_nothing_to_learn) == (2, 3, 1)


def test_bad_records_stop_or_are_skipped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", ("q", "yes", "no"))
    with file.open("a") as handle:
        handle.write('{"instruction": "q", "output": "a"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: a chat record among data of kind preference"):
        prepare_pairs([file], tokenizer, seq_length=40)
    store, report = prepare_pairs([file], tokenizer, seq_length=40, on_error="skip")
    assert (len(store), report.skipped.count) == (2, 1)
    with pytest.raises(DataError, match=r"no sample is left to train on .*First: .*a\.jsonl:2"):
        prepare_pairs([file], tokenizer, seq_length=1, on_error="skip")
    with pytest.raises(UsageError, match=r"seq_length=0"):
        prepare_pairs([file], tokenizer, seq_length=0)
