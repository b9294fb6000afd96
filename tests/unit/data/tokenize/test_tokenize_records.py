"""Files to samples: what is kept, cut, dropped, skipped and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.tokenize.record_kinds import CHAT, PREFERENCE
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from unit.data.tokenized import loss_text, num_loss_tokens, tokenized


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=270))


def chats(path: Path, *answers: str, question: str = "q") -> Path:
    lines = [{"instruction": question, "output": answer} for answer in answers]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_chats_become_samples(tmp_path, tokenizer):
    files = [chats(tmp_path / "a.jsonl", "one", "two ✓"), chats(tmp_path / "b.jsonl", "three")]
    store, stats = tokenized("chat", files, tokenizer, 64)
    assert [loss_text(store, k, tokenizer) for k in range(3)] == [f"{a}<|im_end|>" for a in ("one", "two ✓", "three")]
    assert (stats.records, stats.samples, stats.tokens, stats.loss_tokens) == (
        3,
        3,
        store.num_tokens,
        num_loss_tokens(store),
    )
    assert stats.notes == []
    assert stats.summary(CHAT).startswith("3 records -> 3 samples, ")


def test_pairs_are_counted_as_pairs():
    stats = TokenizeStats(records=300, samples=598, tokens=123456, loss_tokens=1, dropped_overlong=1)
    expected = "300 records -> 299 pairs, 123,456 tokens, 1 with loss, 1 dropped as too long"
    assert stats.summary(PREFERENCE) == expected
    assert TokenizeStats(records=1, samples=1, tokens=1).summary(CHAT) == "1 record -> 1 sample, 1 token, 0 with loss"


def test_long_samples_are_truncated_or_dropped(tmp_path, tokenizer):
    file = chats(tmp_path / "a.jsonl", "x" * 100, "short")
    store, stats = tokenized("chat", [file], tokenizer, 40)
    assert (len(store), stats.truncated, int(store.lengths.max())) == (2, 1, 41)
    assert set(loss_text(store, 0, tokenizer)) == {"x"}
    store, stats = tokenized("chat", [file], tokenizer, 40, overlong="drop")
    assert (len(store), stats.dropped_overlong) == (1, 1)
    long_question = chats(tmp_path / "b.jsonl", "short", question="y" * 100)
    store, stats = tokenized("chat", [file, long_question], tokenizer, 40)
    assert (len(store), stats.dropped_without_loss) == (2, 1)


def test_no_samples_is_an_error(tmp_path, tokenizer):
    file = chats(tmp_path / "b.jsonl", "short", question="y" * 100)
    with pytest.raises(DataError, match=r"no sample is left to train on .*1 dropped without loss tokens"):
        tokenized("chat", [file], tokenizer, 40)
    file.write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"1 bad records skipped. First: .*b\.jsonl:1: no assistant turn"):
        tokenized("chat", [file], tokenizer, 40, on_error="skip")


def test_bad_records_stop_or_are_skipped(tmp_path, tokenizer):
    file = chats(tmp_path / "a.jsonl", "one", "two")
    with file.open("a") as handle:
        handle.write('{"messages": [{"role": "user", "content": "q"}]}\n{"text": "t"}\n')
        handle.write('{"messages": [{"role": "user", "content"\n')
    with pytest.raises(DataError, match=r"a\.jsonl:3: no assistant turn"):
        tokenized("chat", [file], tokenizer, 64)
    store, stats = tokenized("chat", [file], tokenizer, 64, on_error="skip")
    assert (len(store), stats.skipped.count) == (2, 3)
    assert "plain text among data of kind chat" in stats.skipped.reasons[1]


def test_note_for_template_without_end_token(tmp_path):
    endless = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\n' -}}{%- endfor -%}"
    tokenizer = Tokenizer(train_tokenizer(["a"], vocab_size=260, chat_template=endless))
    _, stats = tokenized("chat", [chats(tmp_path / "a.jsonl", "one")], tokenizer, 64)
    assert "may not learn to stop" in stats.notes[0]


def test_document_windows_have_each_token_as_target_once(tmp_path, tokenizer):
    words = ["sea", "x" * 8, "y" * 9, "", "z"]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    store, stats = tokenized("text", [file], tokenizer, 4)
    assert stats.dropped_without_loss == 1
    full = [[*tokenizer.encode(word), tokenizer.eos_id] for word in words if word]
    again: list[list[int]] = []
    for k in range(len(store)):
        tokens = store[k][0].tolist()
        assert 2 <= len(tokens) <= 5
        if not again or again[-1][-1] == tokenizer.eos_id:
            again.append(tokens[:1])
        assert again[-1][-1] == tokens[0]
        again[-1] += tokens[1:]
    assert again == full
    assert num_loss_tokens(store) == sum(len(document) - 1 for document in full)
    settings = BatchSettings(seq_length=4, micro_batch_size=1, global_batch_size=1, packing=True)
    assert Batches(store, settings).sequences_per_epoch


def test_text_needs_documents_and_eos(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"a\.jsonl:1: a chat record among data of kind text"):
        tokenized("text", [chats(tmp_path / "a.jsonl", "one")], tokenizer, 4)
    with pytest.raises(UsageError, match="seq_length=0"):
        tokenized("chat", [chats(tmp_path / "a.jsonl", "one")], tokenizer, 0)
    with pytest.raises(UsageError, match="no data files"):
        tokenized("text", [], tokenizer, 4)
    with pytest.raises(MissingInput):
        tokenized("text", [tmp_path / "none.txt"], tokenizer, 4)


@pytest.mark.parametrize(
    ("name", "records"),
    [("alpaca_en_demo.json", 999), ("glaive_toolcall_en_demo.json", 300)],
)
@pytest.mark.sweep
def test_real_chats_with_the_llama2_tokenizer(shared_data, name, records):
    pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
    tokenizer = load_tokenizer(shared_data / "llama2-tokenizer")
    assert tokenizer.template_source == "plain"
    store, stats = tokenized("chat", [shared_data / name], tokenizer, 16384)
    assert (stats.records, stats.samples) == (records, records)
    source = json.loads((shared_data / name).read_text())
    for k in (0, 1, records // 2, records - 1):
        if "output" in source[k]:
            expected = [source[k]["output"]]
        else:
            turns = source[k]["conversations"]
            expected = [turn["value"] for turn in turns if turn["from"] == "gpt"]
            assert loss_text(store, k, tokenizer).count("</tool_call></s>") == sum(
                turn["from"] == "function_call" for turn in turns
            )
        text = loss_text(store, k, tokenizer)
        assert all(f"{answer}</s>" in text for answer in expected)
        assert text.count("</s>") == sum(
            "output" in source[k] or t["from"] in ("gpt", "function_call")
            for t in (source[k].get("conversations", [None]))
        )
        assert "### User" not in text
        assert int(store[k][0][0]) == tokenizer.bos_id == 1


@pytest.mark.sweep
def test_real_documents(shared_data):
    pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
    tokenizer = load_tokenizer(shared_data / "llama2-tokenizer")
    store, stats = tokenized("text", [shared_data / "c4_demo.jsonl"], tokenizer, 512)
    assert stats.records == 300
    assert sum(int((store[k][0] == tokenizer.eos_id).sum()) for k in range(len(store))) == 300
    assert int(store.lengths.max()) == 513
    with pytest.raises(DataError, match="preference pair"):
        tokenized("chat", [shared_data / "dpo_en_demo.json"], tokenizer, 512)
