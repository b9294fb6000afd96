from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.errors import DataError, UnsafeInput
from isthmus.files.checked_files import ChecksumVerifier, ListedFile, trusting
from isthmus.files.file_checksums import (
    BLOCK_BYTES,
    CHECKSUMS,
    WrittenBlocks,
    content_checksum,
    hash_block,
    hash_file,
    read_checksums,
    write_checksums,
)
from isthmus.files.packed_checksums import packed, unpacked

SIZE = 3 * BLOCK_BYTES + 1234


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def _content() -> bytes:
    return random.Random(5).randbytes(SIZE)


def _folder(path: Path, parts: Any = ()) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.bin").write_bytes(_content())
    (path / "config.json").write_text("{}")
    (path / "hf").mkdir(exist_ok=True)
    (path / "hf" / "empty").write_bytes(b"")
    write_checksums(path, parts)
    return path


def _listed(folder: Path) -> ListedFile:
    listed = ChecksumVerifier().file(folder / "model.bin")
    assert listed is not None
    return listed


def test_packed_list_detects_the_same_damage(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a")
    files = read_checksums(folder) or {}
    assert unpacked(memoryview(packed(files))) == files and unpacked(memoryview(packed({}))) == {}
    verifier = ChecksumVerifier()
    verifier.use_packed_list(folder, memoryview(ChecksumVerifier().packed_list(folder)))
    (folder / CHECKSUMS).unlink()
    verifier.check(folder / "model.bin")
    _flip(folder / "model.bin", BLOCK_BYTES + 5)
    other = ChecksumVerifier()
    other.use_packed_list(folder, memoryview(packed(files)))
    with pytest.raises(DataError, match=f"bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}, in w, do not match"):
        other.check(folder / "model.bin", tensor="w")


def test_each_folder_lists_its_own_files_and_they_pass(tmp_path: Path) -> None:
    folder, verifier = _folder(tmp_path / "a"), ChecksumVerifier()
    assert {name: entry.size for name, entry in (read_checksums(folder) or {}).items()} == {
        "config.json": 2, "model.bin": SIZE
    }  # fmt: skip
    assert list(read_checksums(folder / "hf") or {}) == ["empty"]
    verifier.check(folder / "model.bin")
    verifier.check(folder / "hf" / "empty")
    assert verifier.read_bytes(folder / "config.json") == b"{}"
    assert read_checksums(tmp_path) is None and not verifier.has_list(tmp_path) and verifier.has_list(folder)


@pytest.mark.parametrize("offset", [0, BLOCK_BYTES - 1, BLOCK_BYTES, SIZE - 1])
def test_a_flip_is_found_in_the_blocks_that_are_read(tmp_path: Path, offset: int) -> None:
    folder = _folder(tmp_path)
    _flip(folder / "model.bin", offset)
    block = offset // BLOCK_BYTES * BLOCK_BYTES
    message = f"bytes {block} to {min(SIZE, block + BLOCK_BYTES)}, in lm_head, do not match .*--trust"
    with pytest.raises(DataError, match=message):
        ChecksumVerifier().check(folder / "model.bin", offset, offset + 1, tensor="lm_head")
    with pytest.raises(DataError, match="is damaged"):
        _listed(folder).check_read(0, memoryview((folder / "model.bin").read_bytes()))
    with pytest.raises(DataError, match="is damaged"):
        ChecksumVerifier().read_bytes(folder / "model.bin")
    other = (offset + 2 * BLOCK_BYTES) % SIZE
    ChecksumVerifier().check(folder / "model.bin", other, other + 1)
    with trusting():
        ChecksumVerifier().check(folder / "model.bin")


def test_other_sizes_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.bin").write_bytes(_content()[:BLOCK_BYTES])
    for check in (ChecksumVerifier().check, ChecksumVerifier().read_bytes):
        with pytest.raises(DataError, match=f"model.bin has {BLOCK_BYTES} bytes; .* {SIZE} bytes"):
            check(folder / "model.bin")
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"config.json is missing"):
        ChecksumVerifier().check_folder(folder)
    (folder / "added.txt").write_text("of somebody else")
    ChecksumVerifier().check(folder / "added.txt")


def test_blocks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, verifier = _folder(tmp_path), ChecksumVerifier()
    verifier.check(folder / "model.bin")
    monkeypatch.setattr("isthmus.files.checked_files.hash_block", lambda *_: pytest.fail("read again"))
    verifier.check(folder / "model.bin")
    content = memoryview(_content())
    _listed(folder).check_read(BLOCK_BYTES, content[BLOCK_BYTES : 3 * BLOCK_BYTES])


def _pieces(kind: str) -> list[list[tuple[int, int]]]:
    """Byte ranges that each process writes, in order."""
    cut = BLOCK_BYTES // 3
    pieces = [(at, min(SIZE, at + cut)) for at in range(0, SIZE, cut)]
    return {
        "in order": [pieces],
        "at once": [[(0, SIZE)]],
        "in reverse": [pieces[::-1]],
        "by two processes": [pieces[::2], pieces[1::2]],
        "half by each": [[(0, SIZE // 2)], [(SIZE // 2, SIZE)]],
        "twice": [[(0, SIZE), (100, 200)]],
    }[kind]


@pytest.mark.parametrize("kind", ["in order", "at once", "in reverse", "by two processes", "half by each", "twice"])
def test_written_buffers_give_the_hashes_of_the_file(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    content, parts = _content(), []
    for ranges in _pieces(kind):
        written = WrittenBlocks()
        for start, stop in ranges:
            written.add("model.bin", start, content[start:stop])
        parts.append(written.parts())
    read: list[tuple[str, int]] = []
    monkeypatch.setattr("isthmus.files.file_checksums.hash_block", _recorded(read))
    folder = _folder(tmp_path, parts)
    expected = {"in order": 0, "at once": 0, "in reverse": 3, "by two processes": 3, "half by each": 1, "twice": 1}
    assert len([number for name, number in read if name == "model.bin"]) == expected[kind]
    monkeypatch.undo()
    assert (read_checksums(folder) or {})["model.bin"] == hash_file(folder / "model.bin")


def _recorded(read: list[Any]) -> Any:

    def recorded(path: Path, number: int, block_bytes: int) -> bytes:
        read.append((path.name, number))
        return hash_block(path, number, block_bytes)

    return recorded


def test_forgotten_ranges_are_hashed_from_the_file(tmp_path: Path) -> None:
    written = WrittenBlocks()
    written.add("model.bin", 0, bytes(SIZE))
    written.forget("model.bin", 5, SIZE)
    folder = _folder(tmp_path, [written.parts()])
    assert (read_checksums(folder) or {})["model.bin"] == hash_file(folder / "model.bin")


def test_wrapped_file_hashes_what_torch_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = WrittenBlocks()
    with written.wrap((tmp_path / "state.pt").open("wb"), "state.pt") as file:
        file.write(b"before")
        torch.save({"weight": torch.arange(SIZE // 4)}, file)
        assert file.tell() == (tmp_path / "state.pt").stat().st_size or not file.flush()
    monkeypatch.setattr("isthmus.files.checked_files.hash_block", lambda *_: pytest.fail("read again"))
    write_checksums(tmp_path, [written.parts()])
    assert ChecksumVerifier().read_bytes(tmp_path / "state.pt").startswith(b"before")


def test_wrapped_file_may_seek(tmp_path: Path) -> None:
    written, plain = WrittenBlocks(), io.BytesIO()
    with written.wrap((tmp_path / "a").open("wb"), "a") as file:
        for target in (file, plain):
            target.write(_content())
            target.seek(BLOCK_BYTES + 7)
            target.write(b"changed")
    write_checksums(tmp_path, [written.parts()])
    assert ChecksumVerifier().read_bytes(tmp_path / "a") == plain.getvalue()


def _edit(folder: Path, change: Any) -> None:
    content = json.loads((folder / CHECKSUMS).read_bytes())
    content.pop("checksum")
    change(content)
    (folder / CHECKSUMS).write_text(json.dumps({**content, "checksum": content_checksum(content)}))


@pytest.mark.parametrize("name", ["../model.bin", "/etc/passwd", "hf/empty", "..", "a\\b", "a\0b", ""])
def test_a_list_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path)
    _edit(folder, lambda content: content["files"].update({name: content["files"]["config.json"]}))
    with pytest.raises(UnsafeInput, match="is not a file of this folder"):
        ChecksumVerifier().check(folder / "config.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(algorithm="md5"),
        lambda content: content.update(files=[]),
        lambda content: content.update(files=7),
        lambda content: content["files"]["model.bin"].update(bytes=-1),
        lambda content: content["files"]["model.bin"].update(bytes="1"),
        lambda content: content["files"]["model.bin"].update(bytes=1 << 80),
        lambda content: content["files"]["model.bin"].update(block_bytes=1),
        lambda content: content["files"]["model.bin"].update(blocks="zz" * 8 * 4),
        lambda content: content["files"].update({"model.bin": None}),
        lambda content: content.pop("files"),
    ],
)
def test_a_list_of_another_kind_is_refused(tmp_path: Path, change: Any) -> None:
    folder = _folder(tmp_path)
    _edit(folder, change)
    with pytest.raises(DataError, match=r"checksums.json is damaged, or not a list"):
        ChecksumVerifier().check(folder / "config.json")


@pytest.mark.slow
def test_no_damage_of_the_list_is_silent(tmp_path: Path) -> None:
    folder, chance = _folder(tmp_path), random.Random(0)
    path = folder / CHECKSUMS
    sound, expected = path.read_bytes(), read_checksums(folder)
    for number in range(400):
        at = chance.randrange(len(sound))
        if number % 4 == 0:
            path.write_bytes(sound[:at])
        elif number % 4 == 1:
            path.write_bytes(sound[:at] + bytes(min(64, len(sound) - at)) + sound[at + 64 :])
        else:
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << chance.randrange(8)]) + sound[at + 1 :])
        try:
            checksums = read_checksums(folder)
        except (DataError, UnsafeInput):
            continue
        assert checksums == expected, f"{at} {number}"


def test_a_deep_or_huge_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CHECKSUMS).write_text("[" * 100_000)
    with pytest.raises(DataError, match="is damaged"):
        read_checksums(tmp_path)
    with (tmp_path / CHECKSUMS).open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr("isthmus.files.file_checksums._MAX_LIST_BYTES", 1 << 20)
    with pytest.raises(DataError, match="more than 1 MiB"):
        read_checksums(tmp_path)
