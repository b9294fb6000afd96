"""Guesses which fields of a record of unknown format are meant, for error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_WORDS: Mapping[str, frozenset[str]] = {
    field: frozenset(words.split())
    for field, words in {
        "prompt": "prompt question query instruction input user human ask problem task q request source",
        "completion": "completion answer response output reply assistant solution target summary bot gpt a result",
        "chosen": "chosen preferred accepted accept winner win better good positive pos best",
        "rejected": "rejected dispreferred refused reject loser lose worse bad negative neg worst",
    }.items()
}
_PLAIN = re.compile(r"[^\W\d]\w*")
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


def guessed_columns(value: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Known field -> field of the record, for a record that is to be of ``kind``; empty without a guess."""
    texts = [name for name, cell in value.items() if isinstance(cell, str) and cell.strip()]
    if kind == "text":
        return {"text": max(texts, key=lambda name: len(value[name]))} if texts else {}
    if kind == "preference":
        named = {field: _named(field, [*value]) for field in ("prompt", "chosen", "rejected")}
        answers = named["chosen"] is not None and named["rejected"] is not None
        return {field: name for field, name in named.items() if name is not None} if answers else {}
    for name, cell in value.items():
        if isinstance(cell, list) and cell and isinstance(cell[0], dict) and {"role", "from"} & cell[0].keys():
            return {"messages": name}
    guesses = {field: _named(field, texts) for field in ("prompt", "completion")}
    rest = iter([name for name in texts if name not in guesses.values()])
    columns = {field: guesses[field] or next(rest, "") for field in ("prompt", "completion")}
    return columns if all(columns.values()) else {}


def columns_setting(columns: Mapping[str, str]) -> str:
    """``'data.columns={text: body}'``, to paste into a command."""
    names = {field: name if _PLAIN.fullmatch(name) else json.dumps(name) for field, name in columns.items()}
    pairs = (f"{field}: {name}" for field, name in names.items())
    return f"'data.columns={{{', '.join(pairs)}}}'"


def _named(field: str, names: list[str]) -> str | None:
    parts = {name: {part.lower() for part in _PARTS.findall(str(name))} for name in names}
    return next((name for name in names if _WORDS[field] & parts[name]), None)
