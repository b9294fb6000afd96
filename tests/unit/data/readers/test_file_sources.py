"""Names stand for files, folders, patterns and data sets; each kind gives the same records and says what is bad."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd

from isthmus.data.readers import chunks, csv_reader, json_chunks
from isthmus.data.readers.chunks import SkippedRecords
from isthmus.data.readers.file_formats import chunk_records, read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.errors import DataError, IOFailure, IsthmusError, MissingInput, UsageError
from optional_packages import datasets
from unit.data.records import read_records

TALK = [{"role": "user", "content": "q ✓\nmore"}, {"role": "assistant", "content": "a"}]
VALUES = [{"n": str(n), "messages": TALK} for n in range(40)]
LINES = "".join(json.dumps(value) + "\n\n" for value in VALUES).encode()

SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00none"  # a frame of Zstandard that holds no data, as seekable files have


def values(*names: Path | str, **options) -> list[dict]:
    return [record.value for name in names for record in read_records(name, **options)]


def write_parquet(path: Path, rows: list[dict], **options) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def write_csv(path: Path) -> Path:
    cells = ['"' + json.dumps(value["messages"]).replace('"', '""') + '"' for value in VALUES]
    path.write_text("n,messages\r\n" + "".join(f"{n},{cell}\r\n" for n, cell in enumerate(cells)), newline="")
    return path


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """The same records in every kind of file."""
    contents = {
        "jsonl": LINES, "json": json.dumps(VALUES, indent=1, ensure_ascii=False).encode(), "gz": gzip.compress(LINES),
        "two.gz": gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]),
        "zst": zstd.compress(LINES),
        "two.zst": SKIPPED + zstd.compress(LINES[:1000]) + SKIPPED + zstd.compress(LINES[1000:]),
    }  # fmt: skip
    paths = {name: tmp_path / f"a.{name}" for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    paths["parquet"] = write_parquet(tmp_path / "a.parquet", VALUES, row_group_size=15)
    datasets.Dataset.from_list(VALUES).save_to_disk(tmp_path / "set")
    return paths | {"csv": write_csv(tmp_path / "a.csv"), "data set": tmp_path / "set"}


@pytest.mark.slow
def test_all_formats_give_the_same_records_in_picklable_chunks(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (json_chunks, csv_reader):
        monkeypatch.setattr(module, "CHUNK_BYTES", 500)
    monkeypatch.setattr("isthmus.data.readers.arrow_reader._MOST_ROWS", 7)
    lines = {"json": 2 + 13 * 39, "csv": 41, "parquet": 40, "data set": 40}
    for kind, path in sources.items():
        cut = list(read_chunks([path]))
        assert len(cut) > 5, kind
        records = [record for chunk in pickle.loads(pickle.dumps(cut)) for record in chunk_records(chunk)]
        got = [record.value for record in records]
        if kind == "csv":
            got = [value | {"messages": json.loads(value["messages"])} for value in got]
        assert got == VALUES, kind
        where = [record.where for record in records]
        assert where[-1] == f"{path}:{lines.get(kind, 79)}", kind
        assert len(set(where)) == 40, kind


def test_array_records_do_not_depend_on_chunk_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps([{"é": "✓" * n, "x": [n, -1.5e9, '\\"]']} for n in range(9)], indent=1, ensure_ascii=False)
    path = tmp_path / "a.json"
    path.write_text(content)
    full = list(read_records(path))
    assert [record.where for record in full] == [f"{path}:{2 + 8 * n}" for n in range(9)]
    broken = content.replace("-1500000000.0,", "-1500000000.0")
    for size in (1, 2, 3, 7, 50):
        monkeypatch.setattr(json_chunks, "CHUNK_BYTES", size)
        assert list(read_records(path)) == full
        path.write_text(broken)
        with pytest.raises(DataError, match=r"a\.json:7: not JSON: Expecting ',' delimiter \(column 4\)"):
            values(path)
        path.write_bytes(content.encode().replace("✓".encode(), b"\xff"))
        with pytest.raises(DataError, match=r"a\.json:11: not UTF-8: byte 0xff at byte column 10"):
            values(path)
        path.write_text(content)


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    """Chunks are no larger than they should be, and none is made before it is asked for."""
    text = random.Random(0).randbytes(1000).hex()
    lines = "".join(json.dumps({"text": text, "n": n}) + "\n" for n in range(3000))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps([{"text": text}] * 3000))
    (tmp_path / "a.csv").write_text("text\n" + f"{text}\n" * 3000)
    write_parquet(tmp_path / "a.parquet", [{"text": text + str(n)} for n in range(3000)], use_dictionary=False)
    for path in tmp_path.iterdir():
        sizes = [len(pickle.dumps(chunk)) for chunk in read_chunks([path])]
        assert len(sizes) >= 5 and max(sizes) < 1.5 * chunks.CHUNK_BYTES, path


def test_table_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffname; text\n"x\ny";"say ""é"""\n\n;z\nonly\n'.encode())
    skipped = SkippedRecords()
    records = list(read_records(path, on_error="skip", skipped=skipped))
    assert [(record.value, record.where.rsplit(":")[-1]) for record in records] == [
        ({"name": "x\ny", "text": 'say "é"'}, "2"),
        ({"name": "", "text": "z"}, "5"),
    ]
    assert skipped.reasons == [f"{path}:6: 1 cells in a table of 2 columns."]
    path.write_bytes(b"\n\nname,text\n\nx,y\n")
    assert [(record.value, record.where) for record in read_records(path)] == [
        ({"name": "x", "text": "y"}, f"{path}:5")
    ]
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"text\tn\na, b\t" + b"x" * 200_000))
    assert values(path) == [{"text": "a, b", "n": "x" * 200_000}]


def test_null_keys_of_arrow_structs_are_removed(tmp_path: Path) -> None:
    rows = [{"tools": [{"a": {"x": 1}}], "text": None}, {"tools": [{"a": {"y": None, "z": [2]}}], "text": "t"}]
    path = write_parquet(tmp_path / "a.parquet", rows)
    assert values(path) == [{"tools": [{"a": {"x": 1}}], "text": None}, {"tools": [{"a": {"z": [2]}}], "text": "t"}]


def test_folder_gives_its_data_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl", "a/c.csv", "c.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    for name in ("README.md", "dataset_info.json", ".hidden.json", "_done.json", ".git/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no data")
    datasets.Dataset.from_list(VALUES).save_to_disk(tmp_path / "a/set")
    result = find_sources([tmp_path])
    short = [os.path.relpath(name, tmp_path) for name in result.names]
    assert short == ["a/c.csv", "a/set", "a/z.jsonl", "b.jsonl", "c.txt.gz"]
    assert len(result.ignored) == 4
    (note,) = result.notes()
    assert note.startswith("4 files in the data folders are ignored") and ".hidden.json" in note
    assert find_sources([tmp_path / "b.jsonl"]).notes() == []


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "odd[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert [value["text"] for value in values(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl", "odd[1].jsonl"]
    assert len(values(tmp_path / "**")) == 4
    assert [value["text"] for value in values(tmp_path / "s*")] == ["sub/c.jsonl"]
    assert [value["text"] for value in values(tmp_path / "odd[1].jsonl")] == ["odd[1].jsonl"]
    with pytest.raises(MissingInput, match="no data file matches"):
        values(tmp_path / "*.gz")


@pytest.mark.parametrize("kind", ["gz", "zst", "two.zst", "parquet", "data set"])
@pytest.mark.parametrize("fraction", [0.3, 0.999])
def test_truncated_file(sources: dict[str, Path], kind: str, fraction: float) -> None:
    path = sources[kind]
    file = next(path.glob("*.arrow")) if path.is_dir() else path
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(DataError, match=r"truncated|damaged") as caught:
        values(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
def test_corrupted_file(sources: dict[str, Path], kind: str) -> None:
    content = bytearray(sources[kind].read_bytes())
    content[20:60] = bytes(40)
    sources[kind].write_bytes(content)
    with pytest.raises(DataError, match=kind):
        values(sources[kind])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"", "a.parquet: damaged or truncated"),
        ("a.parquet", b"PAR1", "a.parquet: damaged or truncated"),
        ("a.parquet", LINES, "a.parquet: damaged or truncated"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "Decompress it"),
        ("a.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n{"a"\n', mtime=0), "a.jsonl.gz:2: not JSON"),
        ("a.jsonl", b"BZh91AY", "compressed with bzip2. Expected no compression, gzip or Zstandard"),
        ("a.csv", b"", "the file is empty"),
        ("a.csv", b"text,n\n", "the table has no rows"),
        ("a.csv", b"text,\nx,y\n", "a.csv:1: the first row must contain the column names, but a name is empty"),
        ("a.csv", b"a,a\nx,y\n", "'a' occurs twice"),
        ("a.csv", b'a,b\n1,2\nx,"y\n\n3,4\n', "a.csv:3: not a row of a table: unexpected end of data. Is"),
        ("a.csv", b'a,b\n1,2\nx,"y"z\n', "a.csv:3: not a row of a table"),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv:2: 3 cells in a table of 2 columns"),
        ("a.csv", b"a,b\n1,\xff\n", "a.csv:2: not UTF-8"),
    ],
)  # fmt: skip
def test_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        values(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_empty_tables(tmp_path: Path) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the table has no rows"):
        values(tmp_path / "a.parquet")


def test_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test", "extra")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    assert values(tmp_path / "all") == [{"text": "train"}]
    assert values(tmp_path / "all/test") == [{"text": "test"}]
    del parts["train"]
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "some")
    with pytest.raises(UsageError, match=r"has the splits test, extra\. Name the folder of one of them"):
        values(tmp_path / "some")


def test_hub_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, configuration: str | None, *, split: str) -> datasets.Dataset:
        asked.append((path, configuration, split))
        return datasets.Dataset.from_list(VALUES)

    monkeypatch.setattr("datasets.load_dataset", load)
    assert values("hf:org/name", "hf:org/name:test[:5]", "hf:org/name/en:train") == VALUES * 3
    assert asked == [("org/name", None, "train"), ("org/name", None, "test[:5]"), ("org/name", "en", "train")]
    assert values("org/name", "org/name:test") == VALUES * 2
    for name in ("hf:", "hf:org/", "hf:org/name:", "hf:org/name/"):
        with pytest.raises(UsageError, match="Expected hf:ORG/NAME"):
            values(name)


def test_files_and_mistyped_paths_are_no_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats").write_text('{"text": "a"}\n')
    assert values("data/chats") == [{"text": "a"}]
    for name in ("data/chat", "datas/chats.jsonl", "datas/a.json.gz", "a/b/c", "./a/b", "org/prefix.bin"):
        with pytest.raises(MissingInput, match="no such data file"):
            values(name)


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        ("'o/n' is gated", MissingInput, "hf auth login, or HF_TOKEN"),
        (ValueError('Unknown split "x". Should be one of ["train"]'), UsageError, "Should be one of"),
        (ConnectionError("Couldn't reach\nthe Hub"), MissingInput, "no local file or folder o/n, .* Without a network"),
        (RuntimeError("damaged"), IOFailure, "cannot be downloaded"),
    ],
)  # fmt: skip
def test_missing_hub_dataset(
    monkeypatch: pytest.MonkeyPatch, raised: Exception | str, kind: type[IsthmusError], words: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError(raised) if isinstance(raised, str) else raised

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(kind, match=words) as caught:
        values("hf:o/n")
    assert str(caught.value).startswith("hf:o/n: ") and "\n" not in str(caught.value)


def test_missing_library_is_reported(sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "backports.zstd", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for kind in ("parquet", "zst", "data set"):
        with pytest.raises(UsageError, match=r"pip install 'isthmus\[data\]'"):
            values(sources[kind])
