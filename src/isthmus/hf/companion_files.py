"""Checks that the small files of a model folder can be parsed, before an export copies them unchanged."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.files.input_files import read_bytes
from isthmus.hf.model_folder import GENERATION_FILE, TOKENIZER_CONFIG, ModelFolder, read_json

_TOKENIZER = "tokenizer.json"
_BYTES = 256 << 20
_VOCABULARY = ("vocab", "merges")
_HINT = "It would be copied: correct it, fetch it again, or remove it from the folder."
_RANK = re.compile(rb"\S+ \d+")
"""Line of tiktoken: a token in base64, and its rank."""


def check_companions(folder: ModelFolder) -> None:
    """DataError with the name of the first small file that cannot be parsed; licenses are any text."""
    for path in folder.small_files():
        with _parsing(path):
            _check(path, folder)


def _check(path: Path, folder: ModelFolder) -> None:
    if path.name == _TOKENIZER:
        from tokenizers import Tokenizer

        read_bytes(path, _BYTES)
        Tokenizer.from_file(str(path))
    elif path.suffix == ".json":
        content: Any = read_json(path)
        if path.name == GENERATION_FILE:
            folder.end_tokens()
        if path.name == TOKENIZER_CONFIG or path.name.startswith("chat_template"):
            _check_templates(_templates(content.get("chat_template")))
    elif path.suffix == ".jinja":
        _check_templates([read_bytes(path).decode()])
    elif path.suffix == ".model":
        _check_model(path)
    elif path.suffix == ".tiktoken":
        _check_ranks(read_bytes(path, _BYTES))
    elif path.name.startswith(_VOCABULARY):
        read_bytes(path, _BYTES).decode()


def _templates(value: object) -> Iterator[str]:
    """The templates of a tokenizer: none, one, or several with names."""
    for template in value if isinstance(value, list) else [value]:
        text = template.get("template") if isinstance(template, dict) else template
        if isinstance(text, str):
            yield text
        elif value is not None:
            raise ValueError("chat_template is neither a text nor a list of objects with name and template")


def _check_templates(templates: Iterable[str]) -> None:
    for template in templates:
        from isthmus.hf.tokenizer.bounded_template import check_syntax  # imports transformers

        check_syntax(template)


def _check_model(path: Path) -> None:
    from isthmus.hf.tokenizer.sentencepiece_model import parse_sentencepiece

    try:
        if parse_sentencepiece(path) is None:
            _check_ranks(read_bytes(path, _BYTES))
    except UsageError:
        pass  # the optional package that reads it is not installed


def _check_ranks(content: bytes) -> None:
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line and not _RANK.fullmatch(line):
            raise ValueError(f"line {number} of {len(lines)} is not a token with its rank")
        base64.b64decode(line.partition(b" ")[0], validate=True)


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{_with_path(error, path)} {_HINT}") from error
    except OSError:
        raise
    except BaseException as error:  # each parser fails in its own way, that of tokenizers by a panic of Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise DataError(f"{path} cannot be parsed: {reason}. {_HINT}") from error


def _with_path(error: DataError, path: Path) -> str:
    return str(error) if str(path) in str(error) else f"{path}: {error}"
