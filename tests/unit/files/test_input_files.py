"""Pipes, devices and sockets are refused before they are opened; JSON has a largest size and depth."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from isthmus.config.load import load_config
from isthmus.data.readers.file_formats import read_chunks
from isthmus.errors import DataError, UnsafeInput
from isthmus.files.input_files import MAX_DEPTH, check_regular, parse_json, read_json
from isthmus.hf.model_folder import ModelFolder


@pytest.fixture(params=["pipe", "device", "socket"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "special.jsonl"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    return path


def test_special_files_are_no_input(special: Path) -> None:
    with pytest.raises(DataError, match=r"is a (pipe|device|socket), expected a file"):
        check_regular(special)
    with pytest.raises(DataError, match="expected a file"):
        load_config("sft", special)
    for names in ([special], [special.parent], [f"{special.parent}/*.jsonl"]):
        with pytest.raises((DataError, UnsafeInput), match=r"expected a file|is a link to /dev/zero"):
            list(read_chunks(names))


@pytest.mark.slow
def test_a_larger_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # has no blocks on the disk
    with pytest.raises(DataError, match="more than 64 MiB"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_depth(brackets: str) -> None:
    def nested(levels: int) -> str:
        start = '{"a":' if brackets == "{}" else "["
        return start * levels + "1" + brackets[1] * levels

    assert parse_json(nested(MAX_DEPTH)) is not None
    for levels in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="more than 64 levels"):
            parse_json(nested(levels))
    wide = json.dumps([[[]]] * 1000)
    assert len(parse_json(wide)) == 1000
    with pytest.raises(ValueError, match="more than 1,000,000 objects and arrays"):
        parse_json("[" + f"{brackets}," * 1_000_001 + "1]")


@pytest.mark.parametrize(
    "text", ["", "{", "[1,]", '{"a": ' + "9" * 30 + "}", "\xff", "[" * 5000, '{"a": ' + "9" * 9999]
)
def test_text_that_is_no_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(DataError, match=r"config\.json is not valid JSON"):
        read_json(path)
