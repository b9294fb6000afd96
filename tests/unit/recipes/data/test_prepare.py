"""Prepared files do not depend on the number of processes or on interruptions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from isthmus.data.readers.file_formats import read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizeOptions
from isthmus.errors import DataError, MissingInput, OutputExists, Preempted, UnsafeInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer import bounded_encoding
from isthmus.hf.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from isthmus.recipes.data import prepare_resume, prepare_shards, prepare_workers
from isthmus.recipes.data.prepare import prepare, tokenize_files
from isthmus.recipes.data.prepare_workers import tokenize_chunks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=300), folder)
    return folder


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    for module in ("json_chunks", "chunks"):
        monkeypatch.setattr(f"isthmus.data.readers.{module}.CHUNK_BYTES", 200, raising=True)


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(k: int) -> dict:
    return {"instruction": f"question {k}", "output": f"the sea {k} ✓ " * (1 + k % 5)}


def outputs(prefix: Path) -> dict[str, bytes]:
    return {path.name[len(prefix.name) :]: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.*")}


def test_first_records_only(tmp_path, tokenizer, small_chunks):
    """They are counted over all files and before any record is dropped, also by a call that continues."""
    files = find_sources([write(tmp_path / f"{name}.jsonl", [chat(k) for k in range(30)]) for name in "ab"])
    few = find_sources([write(tmp_path / "few.jsonl", [chat(k % 30) for k in range(37)])])
    opened = load_tokenizer(tokenizer)

    def tokens(found, prefix, **options):
        stats = tokenize_files(found, tmp_path / prefix, opened, TokenizeOptions("chat", **options), workers=2)
        return stats.records, open_indexed(tmp_path / prefix).tokens.tolist()

    assert tokens(files, "limited", max_records=37) == tokens(few, "all") == tokens(few, "more", max_records=99)

    def stop(stats):
        raise Preempted("stop")

    options = TokenizeOptions("chat", max_records=37)
    with pytest.raises(Preempted):
        tokenize_files(files, tmp_path / "again", opened, options, workers=1, on_progress=stop)
    assert tokens(files, "again", max_records=37) == tokens(few, "few")


def test_output_does_not_depend_on_workers(tmp_path, tokenizer, small_chunks, monkeypatch):
    monkeypatch.setattr(prepare_workers, "CHUNKS_BEFORE_SPAWN", 3)
    file = write(tmp_path / "a.jsonl", [chat(k) for k in range(60)])
    assert sum(1 for _ in read_chunks([file])) > 10
    contents = []
    for workers, method in ((1, "fork"), (2, "fork"), (3, "fork"), (1, "spawn")):
        prefix = tmp_path / f"out{workers}{method}" / "chats"
        done = prepare([file], prefix, tokenizer, workers=workers, start_method=method)
        contents.append(outputs(prefix))
        assert (done.kind, done.stats.records, done.stats.samples) == ("chat", 60, 60)
    assert contents[0].keys() == {".bin", ".idx", ".mask.bin", ".json"}
    assert all(other == contents[0] for other in contents[1:])
    pair = open_indexed(prefix, verify=True)
    record_tokenizer = RecordTokenizer(load_tokenizer(tokenizer), TokenizeOptions("chat"))
    chunks = [record_tokenizer(chunk) for chunk in read_chunks([file])]
    assert pair.tokens.tolist() == np.concatenate([chunk.tokens for chunk in chunks]).tolist()
    assert pair.mask.tolist() == np.concatenate([chunk.mask for chunk in chunks]).tolist()
    report = pair.manifest["report"]
    assert report["loss_tokens"] == sum(chunk.stats.loss_tokens for chunk in chunks) > 0
    assert sum(report["lengths"].values()) == 60


def test_texts_are_documents_that_end_with_eos(tmp_path, tokenizer):
    texts = ["the sea", "", "x" * 5000]
    file = write(tmp_path / "a.jsonl", [{"body": text} for text in texts])
    done = prepare([file], tmp_path / "out", tokenizer, workers=1, columns={"text": "body"})
    pair, opened = open_indexed(tmp_path / "out", verify=True), load_tokenizer(tokenizer)
    expected = [[*opened.encode(text), opened.eos_id] for text in texts if text]
    assert pair.tokens.tolist() == [token for ids in expected for token in ids]
    assert (pair.mask, pair.lengths.tolist()) == (None, [len(ids) for ids in expected])
    assert pair.documents.tolist() == [0, 1, 2]
    assert (done.stats.dropped_without_loss, done.stats.loss_tokens) == (1, sum(map(len, expected)) - 2)


def test_preference_pairs_are_documents_of_two_samples(tmp_path, tokenizer):
    records = [{"prompt": "q", "chosen": f"good {k}", "rejected": "bad"} for k in range(3)]
    records += [{"prompt": "q", "chosen": "same", "rejected": "same"}]
    records += [{"prompt": "q", "chosen": "y" * 200, "rejected": "bad"}]
    file = write(tmp_path / "a.jsonl", records)
    done = prepare([file], tmp_path / "out", tokenizer, workers=1, seq_length=80, overlong="drop")
    pair, opened = open_indexed(tmp_path / "out"), load_tokenizer(tokenizer)
    assert pair.documents.tolist() == [0, 2, 4, 6]
    learned = [
        opened.decode(pair.tokens[s : s + n][pair.mask[s : s + n] > 0].tolist())
        for s, n in zip(pair.starts, pair.lengths, strict=True)
    ]
    assert learned == [f"{a}<|im_end|>" for k in range(3) for a in (f"good {k}", "bad")]
    assert (done.stats.dropped_overlong, done.stats.dropped_without_loss) == (1, 1)


@pytest.mark.parametrize("damage", [None, "truncated", "removed"])
def test_interrupted_call_is_resumed(tmp_path, tokenizer, small_chunks, monkeypatch, damage):
    monkeypatch.setattr(prepare_shards, "PART_TOKENS", 100)
    file = write(tmp_path / "a.jsonl", [chat(k) for k in range(60)])
    prepare([file], tmp_path / "whole", tokenizer, workers=2)
    seen: list[int] = []

    def ended(stats) -> None:
        seen.append(stats.records)
        if stats.records > 30:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([file], out, tokenizer, workers=2, on_progress=ended)
    parts = sorted(Path(f"{out}.partial").glob("*.npz"))
    assert len(parts) > 3 and not list(tmp_path.glob("out.[!p]*"))
    if damage == "truncated":
        parts[1].write_bytes(parts[1].read_bytes()[:-40])
    elif damage == "removed":
        parts[1].unlink()
    again: list[int] = []
    prepare([file], out, tokenizer, workers=3, on_progress=lambda stats: again.append(stats.records))
    assert outputs(out) == outputs(tmp_path / "whole")
    assert not Path(f"{out}.partial").exists()
    assert (again[0] > 20) == (damage is None)


def test_other_data_starts_again_and_existing_output_is_an_error(tmp_path, tokenizer, small_chunks, monkeypatch):
    monkeypatch.setattr(prepare_shards, "PART_TOKENS", 100)
    file, out = write(tmp_path / "a.jsonl", [chat(k) for k in range(30)]), tmp_path / "out"

    def ended(stats) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([file], out, tokenizer, workers=1, on_progress=ended)
    write(file, [chat(k) for k in range(90, 94)])
    assert prepare([file], out, tokenizer, workers=1).stats.records == 4
    before = outputs(out)
    for tokenizer_path in (tokenizer, tmp_path / "no tokenizer"):  # checked before the tokenizer is loaded
        with pytest.raises(OutputExists, match=r"out\.mask\.bin exists already"):
            prepare([file], out, tokenizer_path, workers=1)
    assert outputs(out) == before
    assert not Path(f"{out}.partial").exists()


def test_parts_with_another_chunk_size_are_not_reused(tmp_path, tokenizer, small_chunks, monkeypatch):
    """Parts count chunks."""
    file = write(tmp_path / "a.jsonl", [chat(k) for k in range(60)])
    monkeypatch.setattr(prepare_shards, "PART_TOKENS", 100)
    with monkeypatch.context() as ended, pytest.raises(KeyboardInterrupt):
        ended.setattr(prepare_resume.PartialOutput, "assemble", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare([file], tmp_path / "out", tokenizer, workers=1)
    assert list((tmp_path / "out.partial").glob("*.npz"))
    monkeypatch.setattr("isthmus.data.readers.json_chunks.CHUNK_BYTES", 1000)
    monkeypatch.setattr(prepare_resume, "CHUNK_BYTES", 1000)
    assert prepare([file], tmp_path / "out", tokenizer, workers=1).stats.records == 60


@pytest.mark.parametrize("changed", [False, True])
def test_call_that_was_killed_between_renames(tmp_path, tokenizer, monkeypatch, changed):
    file, out = write(tmp_path / "a.jsonl", [chat(1)]), tmp_path / "out"
    real = prepare_resume.rename

    def fails(source: Path, target: Path) -> None:
        if str(target) == f"{out}.idx":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(prepare_resume, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        prepare([file], out, tokenizer, workers=1)
    monkeypatch.undo()
    assert Path(f"{out}.bin").exists() and not Path(f"{out}.json").exists()
    if changed:
        write(file, [chat(2), chat(3)])
    prepare([file], out, tokenizer, workers=1)
    prepare([file], tmp_path / "whole", tokenizer, workers=1)
    assert outputs(out) == outputs(tmp_path / "whole")


def test_call_that_was_killed_while_it_removed_the_parts(tmp_path, tokenizer, monkeypatch):
    """The output is complete; what is left of the parts is removed when the same command runs again."""
    file, out = write(tmp_path / "a.jsonl", [chat(1)]), tmp_path / "out"
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(prepare_resume.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare([file], out, tokenizer, workers=1)
    before = Path(f"{out}.bin").read_bytes()
    assert Path(f"{out}.json").exists() and (Path(f"{out}.partial") / "00000-00000.npz").exists()
    with pytest.raises(OutputExists, match="exists already"):
        prepare([file], out, tokenizer, workers=1)
    assert Path(f"{out}.bin").read_bytes() == before and not Path(f"{out}.partial").exists()


@pytest.mark.parametrize(
    ("records", "settings", "error", "message"),
    [
        ([chat(1), {"text": "t"}], {}, DataError, r"a\.jsonl:2: plain text among data of kind chat"),
        ([{"text": "t"}, chat(1)], {}, DataError, r"a\.jsonl:2: a chat record among data of kind text"),
        ([{"what": "t"}], {}, DataError, r"a\.jsonl:1: unknown record with the keys what"),
        ([{"text": " "}], {}, DataError, "no sample is left to train on.*1 dropped without loss tokens"),
        ([{"text": "t"}], {"seq_length": 4}, UsageError, "text is not cut when it is prepared"),
        ([chat(1)], {"kind": "text", "on_error": "skip"}, DataError, r"1 bad records skipped. First: .*a\.jsonl:1"),
        ([{"text": "t"}], {"chat_template": "zephyr"}, UsageError, "--reasoning are for chats, and these records"),
        ([chat(1)], {"chat_template": "gemma"}, UsageError, "the tokenizer has no <start_of_turn>, <end_of_turn>"),
        ([chat(1)], {"columns": {"messagse": "x"}}, UsageError, "Did you mean messages"),
        ([chat(1)], {"tokenizer_type": "Llama2Tokenizer"}, MissingInput, r"tokenizer\.model does not exist"),
        ([chat(1)], {"tokenizer_type": "NullTokenizer"}, UsageError, "is not read from files. Use HuggingFaceTok"),
    ],
)
def test_invalid_data_or_settings_leave_no_output(tmp_path, tokenizer, records, settings, error, message):
    file = write(tmp_path / "a.jsonl", records)
    with pytest.raises(error, match=message):
        prepare([file], tmp_path / "out", tokenizer, workers=2, **settings)
    assert not list(tmp_path.glob("out*"))


BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
GROWING = [{"type": "Replace", "pattern": {"Regex": "a"}, "content": "aaaaaaaa"}] * 16


@pytest.mark.parametrize(
    ("part", "hostile", "message"),
    [
        ("pre_tokenizer", [BACKTRACKING], "it fails on a text: .*Does a regular expression of it backtrack"),
        ("normalizer", GROWING, r"it takes more than (0 s|2\.0 GiB of memory) for 45 characters"),
    ],
)
def test_a_tokenizer_without_end_is_refused(tmp_path, tokenizer, monkeypatch, part, hostile, message):
    if part == "normalizer":
        monkeypatch.setattr(bounded_encoding, "TIME_S", 0.2)
    folder = Path(shutil.copytree(tokenizer, tmp_path / "tokenizer"))
    settings = json.loads((folder / "tokenizer.json").read_text())
    sequence = [*hostile, settings[part]] if settings[part] else hostile
    settings[part] = {"type": "Sequence", f"{part}s".replace("pre_t", "pret"): sequence}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    file = write(tmp_path / "a.jsonl", [{"text": "a" * 40 + "b sea"}])
    with pytest.raises(UnsafeInput, match=f"the tokenizer of {folder} is refused: {message}"):
        prepare([file], tmp_path / "out", folder, workers=2, start_method="fork")
    assert not list(tmp_path.glob("out.[bij]*"))


def test_message_without_samples_names_three_files(tmp_path, tokenizer):
    for k in range(5):
        write(tmp_path / f"{k}.jsonl", [{"text": " "}])
    with pytest.raises(DataError, match=r"2\.jsonl, \.\.\.: no sample is left") as caught:
        prepare([tmp_path], tmp_path / "out", tokenizer, workers=1)
    assert "3.jsonl" not in str(caught.value)


def test_no_fork_after_torch_distributed_is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert prepare_workers.start_method() == "spawn"
    finally:
        dist.destroy_process_group()


def test_output_may_be_in_the_data_folder(tmp_path, tokenizer):
    folder, records = tmp_path / "data", [{"text": f"the sea {k}"} for k in range(3)]
    folder.mkdir()
    write(folder / "a.jsonl", records)
    for name in ("2.txt", "3.txt"):
        (folder / name).write_bytes(b"" if name == "2.txt" else b"\xff")

    def ended(stats) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([folder], folder / "text", tokenizer, workers=1, on_error="skip", on_progress=ended)
    assert (folder / "text.partial").exists()
    for out in ("text", "again"):
        done = prepare([folder], folder / out, tokenizer, workers=1, on_error="skip")
        assert (done.stats.samples, done.stats.skipped.count) == (3, 2)
    assert outputs(folder / "again")[".bin"] == outputs(folder / "text")[".bin"]
    for out in (folder, folder / "a.jsonl"):
        with pytest.raises(UsageError, match="the last argument must be a prefix"):
            prepare([folder], out, tokenizer, workers=1)


def test_given_kind_is_used(tmp_path, tokenizer):
    """Rows of UltraFeedback are pairs and, by their turns, chats; those of LLaMA-Factory have no answer but the two."""
    asked = {"role": "user", "content": "q"}
    good, bad = [asked, {"role": "assistant", "content": "yes"}], [asked, {"role": "assistant", "content": "no"}]
    row = {"chosen": good, "rejected": bad, "messages": good, "text": "q yes"}
    file = write(tmp_path / "a.jsonl", [row, row, row, {"text": 5}])
    for kind, samples in {"preference": 6, "chat": 3, "text": 3}.items():
        stats = prepare([file], tmp_path / kind, tokenizer, kind=kind, on_error="skip", workers=1).stats
        assert (stats.records, stats.samples, stats.skipped.count) == (4, samples, 1)
    answers = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    file = write(tmp_path / "b.jsonl", [{"conversations": [{"from": "human", "value": "q"}], **answers}])
    with pytest.raises(DataError, match="a preference pair"):
        prepare([file], tmp_path / "b", tokenizer, kind="chat", workers=1)


def test_unreadable_records_are_counted(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [{"text": "t"}, {"text": "u"}])
    file.write_text(file.read_text() + "{\n[1]\n")
    stats = prepare([file], tmp_path / "out", tokenizer, on_error="skip", workers=1).stats
    assert (stats.records, stats.samples, stats.skipped.count) == (4, 2, 2)


def test_few_chunks_are_in_flight(tmp_path, tokenizer, small_chunks):
    file = write(tmp_path / "a.jsonl", [chat(k) for k in range(200)])
    consumed = produced = most = 0

    def counted():
        nonlocal produced, most
        for chunk in read_chunks([file]):
            produced += 1
            most = max(most, produced - consumed)
            yield chunk

    record_tokenizer = RecordTokenizer(load_tokenizer(tokenizer), TokenizeOptions("chat"))
    for _ in tokenize_chunks(record_tokenizer, counted(), 2, "fork"):
        consumed += 1
    assert consumed == produced > 30
    assert most <= 10
