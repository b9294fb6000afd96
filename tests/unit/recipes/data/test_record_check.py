"""Errors of records before anything slow is imported, and the fields that they suggest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.data.chat.chat_records import Kind
from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_formats import rename_fields
from isthmus.data.store.indexed_dataset import IndexedWriter
from isthmus.data.tokenize.record_kinds import RECORD_KINDS
from isthmus.errors import DataError, MissingInput
from isthmus.recipes.data.record_check import check_records


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "record", "setting"),
    [
        ("chat", {"Q": "a", "A": "b", "id": 3}, "{prompt: Q, completion: A}"),
        ("chat", {"answer_text": "b", "the question": "a"}, '{prompt: "the question", completion: answer_text}'),
        ("chat", {"left": "a", "right": "b"}, "{prompt: left, completion: right}"),
        ("chat", {"dialog": [{"role": role, "content": "a"} for role in ("user", "assistant")]}, "{messages: dialog}"),
        ("chat", {"instruction": "a", "modelAnswer": "b"}, "{prompt: instruction, completion: modelAnswer}"),
        ("text", {"title": "a", "body": "a longer text"}, "{text: body}"),
        ("preference", {"q": "a", "better": "b", "worse": "c"}, "{prompt: q, chosen: better, rejected: worse}"),
        ("chat", {"number": 3}, None),
        ("preference", {"a": "b", "c": "d"}, None),
    ],
)  # fmt: skip
def test_an_error_suggests_the_columns_of_this_record(
    tmp_path: Path, kind: Kind, record: dict[str, Any], setting: str | None
) -> None:
    file = write(tmp_path / "a.jsonl", record)
    with pytest.raises(DataError) as caught:
        check_records([[file]], kind, {})
    assert f"{file}:1: " in str(caught.value)
    if setting is None:
        assert str(caught.value).endswith("data.columns maps other names.")
        return
    assert str(caught.value).endswith(f"for this record perhaps 'data.columns={setting}'.")
    flags = {"model": "m", "out": "o", "data": [file]}
    columns = load_config("sft", None, [f"data.columns={setting}"], flags).data.columns
    assert kind == "chat" or columns
    check_records([[file]], kind, columns)
    assert rename_fields(Record(record, "here"), columns)


def test_only_what_is_read_fast_is_read(tmp_path: Path) -> None:
    good, bad = {"prompt": "a", "completion": "b"}, {"x": 1}
    with IndexedWriter(tmp_path / "prepared", "uint16", False) as writer:  # type: ignore[arg-type]
        writer.add([1, 2], None)
        writer.end_document()
    (tmp_path / "a.txt").write_text("text")
    later = write(tmp_path / "later.jsonl", *[good] * 8, bad)
    files = [[str(tmp_path / "prepared")], [later], ["hf:org/name"], [f"{tmp_path}/*.idx"]]
    check_records([*files, [str(tmp_path)]], "chat", {})
    with pytest.raises(DataError, match=r"b.jsonl:1: unknown record"):
        check_records([[later], [write(tmp_path / "b.jsonl", bad)]], "chat", {})
    with pytest.raises(MissingInput):
        check_records([["absent.jsonl"]], "chat", {})
    with pytest.raises(DataError, match="plain text among data of kind chat"):
        check_records([[write(tmp_path / "c.jsonl", {"text": "a"})]], "chat", {})
    assert {*RECORD_KINDS} == {"text", "chat", "preference", "unpaired", "prompt"}


@pytest.mark.processes
@pytest.mark.parametrize("options", [[], ["--nproc", "2"], ["--dry-run"]], ids=" ".join)
def test_a_wrong_record_is_reported_before_torch_is_imported(tmp_path: Path, options: list[str]) -> None:
    file = write(tmp_path / "a.jsonl", {"x": 1})
    argv = ["sft", "--model", "absent", "--data", file, "--out", str(tmp_path / "out"), *options]
    code = (
        "import sys; from isthmus.cli.main import main; code = main(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers', 'megatron') if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 65 and f"isthmus: {file}:1: unknown record with the keys x." in done.stderr
    assert done.stdout == "[]\n" and not (tmp_path / "out").exists()
