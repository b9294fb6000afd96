"""Filters and deduplication by datatrove leave out records, and change nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from isthmus.data.readers.chunks import Record, kept_records
from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.errors import UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from isthmus.recipes.data import prepare_shards
from isthmus.recipes.data.prepare import InputPart, prepare
from isthmus.recipes.data.prepare_slurm import LEFT_OUT

PROSE = "The ship sailed to the island with all of its crew, and they had to be careful of the rocks number {k}. "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([PROSE], vocab_size=300), folder)
    return folder


def test_kept_records_have_their_lines() -> None:
    class Chunk:
        def parse(self):
            return (Record({"text": str(k)}, f"a:{k}") for k in range(4))

    assert [record.where for record in kept_records(Chunk(), frozenset({0, 2})).parse()] == ["a:1", "a:3"]
    chunk = Chunk()
    assert kept_records(chunk, None) is chunk


@pytest.mark.parametrize(
    ("options", "record", "message"),
    [
        ({"dedup": "exact"}, {"prompt": "q", "completion": "a"}, "these records are of kind chat"),
        ({"filters": ["best"]}, {"text": "t"}, "--filter best is not known. Use gopher-quality,"),
        ({"dedup": "exact"}, {"text": "t"}, r"pip install 'isthmus\[dedup\]'"),
    ],
)
def test_refusals(tmp_path: Path, tokenizer: Path, monkeypatch, options, record, message) -> None:
    monkeypatch.setitem(sys.modules, "datatrove", None)
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match=message):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, workers=1, **options)
    assert not list(tmp_path.glob("out*"))


NAMES = ("anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jungle")


def words(number: int) -> str:
    """Texts without common words; datatrove takes all numbers for the same."""
    return " ".join(f"{name}{NAMES[(k * number + number) % 10]}{NAMES[number]}" for k, name in enumerate(NAMES))


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"dedup": "exact"}, {"duplicates": 2}),
        ({"dedup": "minhash"}, {"duplicates": 3}),
        ({"dedup": "exact", "filters": ["gopher-quality"]}, {"gopher-quality": 4, "duplicates": 1}),
    ],
)
def test_left_out_records(tmp_path: Path, tokenizer: Path, monkeypatch, options, left_out) -> None:
    """Duplicates are found in other files; a bad record is skipped by the tokenization, and keeps its line."""
    pytest.importorskip("datatrove", reason="needs datatrove: pip install 'isthmus[dedup]'")
    monkeypatch.setattr(prepare_shards, "SHARD_BYTES", 100)  # a shard per file
    long = [f"{PROSE}{words(k)} " * 3 for k in (8, 9)]
    near = f"{words(1)} {words(2)} {words(3)} {words(4)}"
    texts = [[long[0], words(7), near], [f"{near} end", long[1]], [long[0], words(7)]]
    files = []
    for number, part in enumerate(texts):
        files.append(tmp_path / f"{number}.jsonl")
        lines = [json.dumps({"body": text}) for text in part]
        files[-1].write_text("\n".join([lines[0], "{bad", *lines[1:]]) + "\n")
    settings = {"workers": 2, "columns": {"text": "body"}, "on_error": "skip"}
    done = prepare(files, tmp_path / "out", tokenizer, **settings, **options)
    indexed, opened = open_indexed(tmp_path / "out", verify=True), load_tokenizer(tokenizer)
    report = indexed.manifest["report"]
    assert (report["cleaning"]["documents"], report["cleaning"]["left_out"]) == (7, left_out)
    assert indexed.manifest["cleaning"] == {"filters": options.get("filters", []), "dedup": options["dedup"]}
    assert (done.stats.skipped.count, done.stats.samples) == (3, 7 - sum(left_out.values()))
    assert any(note.startswith(f"{sum(left_out.values())} of 7 documents are left out: ") for note in done.stats.notes)
    kept = [
        opened.decode(indexed.tokens[start : start + length - 1].tolist())
        for start, length in zip(indexed.starts, indexed.lengths, strict=True)
    ]
    all_texts = [text for part in texts for text in part]
    assert len(kept) == len(set(kept)) and set(kept) <= set(all_texts) and long[1] in kept
    # As array jobs: the parts read their texts, the lists are made, then the parts.
    prepare(files, tmp_path / "b", tokenizer, engine="slurm-array", **settings, **options)
    for part, note in [
        *((InputPart(index, 2), "the texts of this part are filtered") for index in range(2)), (LEFT_OUT, "are listed"),
        *((InputPart(index, 2), None) for index in range(2)),
    ]:  # fmt: skip
        notes = prepare(files, tmp_path / "b", tokenizer, part=part, **settings, **options).stats.notes
        assert note is None or note in notes[0]
    made = {path.stem for path in tmp_path.glob("b.partial/[0-9]*.json")}
    shards = prepare_shards.plan_shards([str(file) for file in files])
    assert made == {f"{number:05d}" for number in range(len(shards))} and not list(tmp_path.glob("b.bin"))
    prepare(files, tmp_path / "b", tokenizer, **settings, **options)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"b{suffix}").read_bytes() == (tmp_path / f"out{suffix}").read_bytes()
