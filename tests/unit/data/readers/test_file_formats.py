"""Errors in data files are reported with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from isthmus.data.readers import chunks, csv_reader, json_chunks
from isthmus.data.readers.chunks import SkippedRecords
from isthmus.errors import DataError, MissingInput, UnsafeInput, UsageError
from unit.data.records import read_records


def values(path: Path, **options) -> list[tuple[str, dict]]:
    return [(record.where.rsplit(":", 1)[1], record.value) for record in read_records(path, **options)]


def test_json_format_is_detected_from_content(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"a": 1}\n\n  {"a": 2}\n')
    assert values(path) == [("1", {"a": 1}), ("3", {"a": 2})]
    path.write_bytes(b'\xef\xbb\xbf[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3}]\n')
    assert values(path) == [("2", {"a": 1}), ("4", {"a": 2}), ("5", {"a": 3})]
    path.write_text(json.dumps({"a": {"b": 1}}, indent=1))
    assert values(path) == [("1", {"a": {"b": 1}})]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("rest", [{}, {"version": [1, {"data": "x"}]}])
def test_records_under_data(tmp_path: Path, indent: int | None, rest: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr(json_chunks, "CHUNK_BYTES", 100)
    path, records = tmp_path / "a.json", [{"text": f"record {number}"} for number in range(50)]
    text = json.dumps({"data": records} | rest, indent=indent)
    for name, raw in (("a.json", text.encode()), ("a.json.gz", gzip.compress(b"\xef\xbb\xbf\n" + text.encode()))):
        path = tmp_path / name
        path.write_bytes(raw)
        assert [value for _, value in values(path)] == records
    assert [int(line) for line, _ in values(path)[:2]] == ([2, 2] if indent is None else [4, 7])
    path = tmp_path / "a.json"
    path.write_text(text[: text.index("record 40")])
    with pytest.raises(DataError, match="not JSON"):
        values(path)


def test_other_objects_with_data_are_records(tmp_path: Path) -> None:
    """JSON Lines, one conversation, and texts."""
    path = tmp_path / "a.jsonl"
    for records in (
        [{"data": [{"text": "a"}]}, {"data": [{"text": "b"}]}],
        [{"data": [{"role": "user", "content": "a"}]}],
        [{"data": ["a", "b"]}],
    ):
        path.write_text("\n".join(map(json.dumps, records)) + "\n")
        assert [value for _, value in values(path)] == records


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "sea.txt"
    path.write_text("[not JSON]\n\nblue ✓\n")
    assert values(path) == [("1", {"text": "[not JSON]\n\nblue ✓\n"})]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'[{"a": "1", "b": "x, y"}]'),
        ("a.jsonl", b'{"a": "1", "b": "x, y"}\n'),
        ("a.csv", b'a;b\n1;"x, y"\n'),
        ("a.tsv", b"a\tb\n1\tx, y\n"),
    ],
)
@pytest.mark.parametrize("blanks", [b"\n", b"\xef\xbb\xbf\n\r\n", b" " * 4095 + b"\n", b"\n" * 70_000])
def test_blank_lines_at_the_beginning_are_skipped(tmp_path: Path, name: str, content: bytes, blanks: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(blanks + content)
    ((line, value),) = values(path)
    line_of_names = blanks.count(b"\n") + 1
    assert value == {"a": "1", "b": "x, y"} and int(line) == line_of_names + (not name.startswith("a.json"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"", "a.json: the file is empty"),
        ("a.csv", b"\n" * 5000, "a.csv: the file is empty"),
        ("a.jsonl", b" \n\n", "a.jsonl: the file is empty"),
        ("a.txt", b"\n", "a.txt: the file is empty"),
        ("a.json", b"[ ]", "a.json: the JSON array is empty"),
        ("a.json", b"hello", "a.json:1: not JSON: begins with b'h'"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl:2: not JSON: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl:2: a record must be a JSON object, got list"),
        ("a.json", b'[{"a": 1},\n 7]', "a.json:2: a record must be a JSON object, got int"),
        ("a.json", b'[{"a": 1},\n {"a": "x', "a.json:2: not JSON: Unterminated string"),
        ("a.json", b'[{"a": 1}\n', "a.json:2: not JSON: expected ',' or ']' after a record, the file ends"),
        ("a.json", b'[{"a": 1}\n\n {"a": 2}]', "a.json:3: not JSON: expected ',' or ']' after a record, got '{'"),
        ("a.json", b'[{"a": 1}]\nx', "a.json:2: not JSON: more text after the end of the array"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl:2: not UTF-8: byte 0xff at byte column 8"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]\n', "a.json:2: not UTF-8: byte 0xff at byte column 8"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}\n", "a.jsonl:2: not JSON: Exceeds the limit"),
        ("a.json", b'[{"a": 1},\n{"a": ' + b"9" * 5000 + b"}]", "a.json:2: not JSON: Exceeds the limit"),
        ("a.jsonl", b'{"a": ' + b"[" * 200_000 + b"\n", "a.jsonl:1: not JSON"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        values(path)
    assert message in str(caught.value)
    assert caught.value.exit_code == 65
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(MissingInput, match="no such data file"):
        values(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is a folder"):
        values(tmp_path)


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'nope\n{"a": 1}\n{"a"\n3\n{"a": "\xff"}\n{"a": 2}')
    with pytest.raises(DataError, match="begins with"):  # a file that does not look like JSON at all is never skipped
        values(path, on_error="skip")
    path.write_bytes(b'{"a": 1}\n{"a"\n3\n{"a": "\xff"}\n{"a": 2}')
    skipped = SkippedRecords(keep=2)
    assert [value for _, value in values(path, on_error="skip", skipped=skipped)] == [{"a": 1}, {"a": 2}]
    assert skipped.count == 3
    assert [reason.split(": ")[0].rsplit(":", 1)[1] for reason in skipped.reasons] == ["2", "3"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.json.gz", "a.txt.gz"])
def test_a_bomb_is_not_decompressed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "EXPANDED_BYTES", 1 << 20)
    path = tmp_path / name
    start = {"csv": b"text\n", "json": b'[{"text": "'}.get(name.split(".")[1], b'{"text": "')
    path.write_bytes(gzip.compress(start + b"a" * (3 << 20)))
    with pytest.raises(UnsafeInput, match=r"expands to more than 200 times its size and 1 MiB"):
        list(read_records(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "options"),
    [
        (["a" * 10_000] * 3000, {}),
        ([[{"role": "user", "content": "a" * 10_000}] * 3000], {}),
        (["a" * 1_000_000 + str(number) for number in range(30)], {"use_dictionary": False}),
        (
            ["a" * 1_000_000 + str(number) for number in range(30)],
            {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
        ),
        ([[1] * 3_000_000], {}),
    ],
    ids=["dictionary", "dictionary in a list", "compression", "prefixes", "a list"],
)
def test_a_parquet_bomb_is_not_expanded(
    tmp_path: Path, column: list[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "EXPANDED_BYTES", 1 << 20)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd", **options)
    assert path.stat().st_size < 100_000
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(UnsafeInput, match=r"a\.parquet: expands to more than 200 times its size and 1 MiB"):
        list(read_records(path))
    assert pyarrow.total_allocated_bytes() - before < 16 << 20


def test_repeated_values_of_a_parquet_file_are_read(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer in one sentence. " * 100}
    column = [[system, {"role": "user", "content": str(number)}] for number in range(2000)]
    tags = [{"a": number % 3, "b": ["x", None]} for number in range(2000)]
    table = pyarrow.table({"messages": column, "tags": tags, "kind": pyarrow.array(["k"] * 2000).dictionary_encode()})
    pages = {
        "row_group_size": 700,
        "dictionary_pagesize_limit": 3000,
        "data_page_size": 1000,
    }  # not all in dictionaries
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **pages)
    records = [record.value for record in read_records(tmp_path / "a.parquet")]
    assert [record["messages"] for record in records] == column and records[4]["tags"] == {"a": 1, "b": ["x", None]}
    assert records[-1]["kind"] == "k"


@pytest.mark.parametrize("start", [b'{"text": "', b'[{"text": "', b"text\n"])
def test_a_record_has_a_largest_size(tmp_path: Path, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, json_chunks, csv_reader):
        monkeypatch.setattr(module, "RECORD_BYTES", 1 << 20)
    path = tmp_path / ("a.csv" if start == b"text\n" else "a.json")
    path.write_bytes(start + b"a" * (3 << 20))
    line = 2 if path.suffix == ".csv" else 1
    with pytest.raises(
        UnsafeInput, match=rf"a\{path.suffix}:{line}: this record or line has more than 1 MiB, the limit"
    ):
        list(read_records(path))


@pytest.mark.parametrize("text", ['{"a": %s}', '[{"a": %s}]'])
def test_depth_of_records(tmp_path: Path, text: str) -> None:
    for levels in (70, 900, 100_000):
        path = tmp_path / "a.json"
        path.write_text(text % ("[" * levels + "]" * levels))
        with pytest.raises(DataError, match=r"a\.json:1: not JSON: (more than 64 levels|nested too deeply)"):
            list(read_records(path))


@pytest.mark.slow
def test_many_columns(tmp_path: Path) -> None:
    """Names are compared in linear time."""
    path = tmp_path / "a.csv"
    path.write_text(",".join(f"c{number}" for number in range(200_000)) + "\n1\n")
    with pytest.raises(DataError, match="1 cells in a table of 200000 columns"):
        list(read_records(path))
