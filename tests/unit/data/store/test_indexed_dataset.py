"""Pairs are what Megatron-Core reads and writes, and a damaged one is refused before it is mapped."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from isthmus.data.store.indexed_dataset import (
    IndexedWriter,
    find_prefix,
    open_indexed,
    scan_indexed,
    token_dtype,
    write_manifest,
)
from isthmus.errors import DataError, IsthmusError, MissingInput, NoSpace

DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10, 65000, 1]], [], [[2], [3, 4]]]


def write(prefix, dtype=np.uint16, masked=False, documents=DOCUMENTS):
    with IndexedWriter(prefix, dtype, masked) as writer:
        for document in documents:
            for sequence in document:
                writer.add(sequence, [k % 2 for k in range(len(sequence))] if masked else None)
            writer.end_document()
    write_manifest(prefix, {"kind": "text", "pair": writer.close()})


def sequences(pair) -> list[list[int]]:
    return [pair.tokens[at : at + n].tolist() for at, n in zip(pair.starts, pair.lengths, strict=True)]


FLAT = [sequence for document in DOCUMENTS for sequence in document]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_megatron_reads_our_files(tmp_path, dtype):
    write(tmp_path / "a.b", dtype)
    theirs = IndexedDataset(str(tmp_path / "a.b"), mmap=True)
    assert [theirs[k].tolist() for k in range(len(theirs))] == FLAT
    assert theirs.document_indices.tolist() == [0, 2, 3, 3, 5]
    assert theirs.index.dtype == dtype
    ours = open_indexed(tmp_path / "a.b", verify=True)
    assert sequences(ours) == FLAT
    assert ours.documents.tolist() == [0, 2, 3, 3, 5]
    assert ours.manifest["pair"]["max_token_id"] == 65000
    assert ours.mask is None


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_we_read_files_of_megatron(tmp_path, dtype):
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
    for lengths in ([2, 3], [1]):
        builder.add_document(torch.arange(sum(lengths)), lengths)
    builder.finalize(str(tmp_path / "m.idx"))
    pair = open_indexed(tmp_path / "m")
    assert sequences(pair) == [[0, 1], [2, 3, 4], [0]]
    assert pair.documents.tolist() == [0, 2, 3]
    assert pair.manifest is None
    record = scan_indexed(pair)
    assert (record["max_token_id"], record["tokens"], record["documents"]) == (4, 6, 2)
    write_manifest(tmp_path / "elsewhere", {"pair": record})
    assert sequences(open_indexed(tmp_path / "m", manifest=tmp_path / "elsewhere.json", verify=True))


def test_bytes_equal_those_of_megatron(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16)
    for document in DOCUMENTS:
        builder.add_document([token for sequence in document for token in sequence], [len(s) for s in document])
    builder.finalize(str(tmp_path / "m.idx"))
    write(tmp_path / "ours")
    with IndexedWriter(tmp_path / "bulk", np.uint16) as writer:
        writer.extend(np.concatenate(FLAT), np.array([len(s) for s in FLAT]))
        writer.end_documents([len(document) for document in DOCUMENTS])
    for suffix in (".bin", ".idx"):
        theirs = (tmp_path / f"m{suffix}").read_bytes()
        assert (tmp_path / f"ours{suffix}").read_bytes() == theirs
        assert (tmp_path / f"bulk{suffix}").read_bytes() == theirs


def test_gpt_dataset_of_megatron_has_the_same_tokens(tmp_path):
    tokens = list(range(1, 66))
    write(tmp_path / "t", documents=[[tokens[:40]], [tokens[40:]]])

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, 65001, {"class": "numbers"}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(tmp_path / "t")], None),
        split="1,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [4, None, None], lambda: True, config).build()
    samples = [train[k] for k in range(4)]
    seen = sorted(samples, key=lambda sample: int(sample["tokens"][0]))
    document_order = [1, 41] if int(seen[0]["tokens"][0]) == 1 else [41, 1]
    expected = [*tokens[:40], *tokens[40:]] if document_order[0] == 1 else [*tokens[40:], *tokens[:40]]
    windows = {tuple(expected[at : at + 17]) for at in range(0, 64, 16)}
    assert {(*map(int, s["tokens"]), int(s["labels"][-1])) for s in samples} == windows


def test_mask_file(tmp_path):
    write(tmp_path / "c", masked=True)
    pair = open_indexed(tmp_path / "c", verify=True)
    assert pair.mask.tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1]
    theirs = IndexedDataset(str(tmp_path / "c"))  # its arrays are views of its mapping
    assert theirs[2].tolist() == FLAT[2]
    (tmp_path / "c.json").unlink()
    assert open_indexed(tmp_path / "c").mask.tolist() == pair.mask.tolist()
    (tmp_path / "c.mask.bin").write_bytes(b"\1" * 10)
    with pytest.raises(DataError, match=r"c\.mask\.bin: 10 bytes, expected 11, one per token"):
        open_indexed(tmp_path / "c")


def test_find_prefix(tmp_path):
    write(tmp_path / "a.b", masked=True)
    for name in ("a.b", "a.b.bin", "a.b.idx", "a.b.mask.bin"):
        assert find_prefix(tmp_path / name) == tmp_path / "a.b"
    assert find_prefix(tmp_path / "a") is None
    assert find_prefix(tmp_path) is None


def test_invalid_input_leaves_no_files(tmp_path):
    assert (token_dtype(65499), token_dtype(65500)) == (np.uint16, np.int32)
    for tokens, masks in (([70000], None), ([-1], None), ([1, 2], [1])):
        with pytest.raises(DataError), IndexedWriter(tmp_path / "x", np.uint16, masks is not None) as writer:
            writer.add(tokens, masks)
    with (
        pytest.raises(DataError, match="expected a mask entry"),
        IndexedWriter(tmp_path / "x", np.uint16, True) as writer,
    ):
        writer.add([1])
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = IndexedWriter(tmp_path / "x", np.uint16)
    writer.add([1, 2])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace, match="no space left"):
        writer.close()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_missing_files_and_other_formats_are_refused(tmp_path):
    write(tmp_path / "p")
    with pytest.raises(MissingInput, match=r"q\.bin: no such file"):
        open_indexed(tmp_path / "q")
    raw = (tmp_path / "p.idx").read_bytes()
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(DataError, match="not a manifest of indexed files"):
        open_indexed(tmp_path / "p")
    (tmp_path / "p.json").unlink()
    with pytest.raises(MissingInput, match="cannot be verified"):
        open_indexed(tmp_path / "p", verify=True)
    for changed, message in (
        (raw[:17] + b"\x07" + raw[18:], "its values are float32"),
        (raw[:17] + b"\x63" + raw[18:], "unknown code 99"),
        (raw + b"\0" * 5, "sequence modes"),
        (raw[:9] + b"\x02" + raw[10:], "version 2, expected 1"),
        (b"{}", "not a Megatron index"),
        (b"", "not a Megatron index"),
    ):
        (tmp_path / "p.idx").write_bytes(changed)
        with pytest.raises(DataError, match=message):
            open_indexed(tmp_path / "p")


def test_verify_finds_a_changed_token(tmp_path):
    write(tmp_path / "p")
    raw = bytearray((tmp_path / "p.bin").read_bytes())
    raw[3] ^= 1
    (tmp_path / "p.bin").write_bytes(raw)
    open_indexed(tmp_path / "p")
    with pytest.raises(DataError, match=r"p\.bin: its hash is"):
        open_indexed(tmp_path / "p", verify=True)


@pytest.mark.slow
@pytest.mark.parametrize("with_manifest", [True, False])
def test_damaged_files_are_an_error_or_read_the_same(tmp_path, with_manifest):
    """Flipped and cut bytes; without a manifest only what contradicts itself is found, yet nothing else happens."""
    random_ = random.Random(0)
    write(tmp_path / "good")
    refused = 0
    for trial in range(160):
        for suffix in (".bin", ".idx", ".json"):
            shutil.copy(tmp_path / f"good{suffix}", tmp_path / f"bad{suffix}")
        if not with_manifest:
            (tmp_path / "bad.json").unlink()
        suffix = random_.choice([".idx", ".idx", ".json"] if with_manifest else [".idx"])
        cut = trial % 4 == 0
        path = tmp_path / f"bad{random_.choice(['.idx', '.bin']) if cut else suffix}"
        raw = bytearray(path.read_bytes())
        if cut:
            raw = raw[: random_.randrange(len(raw))]
        else:
            raw[random_.randrange(len(raw))] ^= 1 << random_.randrange(8)
        path.write_bytes(raw)
        try:
            pair = open_indexed(tmp_path / "bad")
            assert sequences(pair) == FLAT or (not with_manifest and not cut)
        except IsthmusError as error:
            refused += 1
            assert str(tmp_path / "bad") in str(error)
        if suffix == ".idx" and with_manifest:
            with pytest.raises(IsthmusError):
                open_indexed(tmp_path / "bad")
    assert refused > 90


def test_the_manifest_is_json_of_sizes_and_hashes(tmp_path):
    write(tmp_path / "p", masked=True)
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["kind"] == "text"
    assert {suffix: file["bytes"] for suffix, file in record["pair"]["files"].items()} == {
        suffix: (tmp_path / f"p{suffix}").stat().st_size for suffix in (".bin", ".idx", ".mask.bin")
    }
    assert (record["pair"]["sequences"], record["pair"]["documents"], record["pair"]["tokens"]) == (5, 4, 11)
    assert not list(tmp_path.glob(".tmp*"))
