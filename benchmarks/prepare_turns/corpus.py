"""Text and chats from the installed Python and its packages: their source files and docstrings."""

from __future__ import annotations

import ast
import inspect
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer

_SHORTEST, _LONGEST = 200, 200_000
_SHORTEST_DOC = 40


def _sources() -> list[Path]:
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), Path(paths["purelib"])]
    files = sorted({path for root in roots for path in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    return files


def write_texts(path: Path, num_bytes: int) -> dict[str, Any]:
    """Write one source file per record, up to ``num_bytes`` of text."""
    size = records = 0
    with path.open("w", encoding="utf-8") as file:
        for source in _sources():
            try:
                text = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if _SHORTEST <= len(text) <= _LONGEST:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                size, records = size + len(text.encode()), records + 1
            if size >= num_bytes:
                break
    return {"records": records, "text_bytes": size}


def write_chats(path: Path, count: int) -> dict[str, Any]:
    """Write questions with docstrings as answers, as prompts and completions, which TRL and Isthmus both read."""
    size = records = 0
    with path.open("w", encoding="utf-8") as file:
        for name, doc in _docstrings():
            prompt = [{"role": "user", "content": f"What does `{name}` do?"}]
            completion = [{"role": "assistant", "content": doc}]
            file.write(json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False) + "\n")
            size, records = size + len(doc.encode()), records + 1
            if records == count:
                break
    return {"records": records, "text_bytes": size}


def _docstrings() -> Iterator[tuple[str, str]]:
    seen = set()
    for source in _sources():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in old docstrings
                tree = ast.parse(source.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = inspect.cleandoc(ast.get_docstring(node) or "")
                if len(doc) >= _SHORTEST_DOC and doc not in seen and _is_text(doc):
                    seen.add(doc)
                    yield f"{source.stem}.{node.name}", doc


def _is_text(doc: str) -> bool:
    try:
        return bool(doc.encode())
    except UnicodeEncodeError:
        return False


def write_tokenizer(folder: Path, texts: Path, vocab_size: int, documents: int) -> None:
    """Train a byte-level BPE tokenizer with ChatML on the first documents."""
    with texts.open(encoding="utf-8") as file:
        read = [json.loads(line)["text"] for _, line in zip(range(documents), file, strict=False)]
    folder.mkdir()
    save_tokenizer(train_tokenizer(read, vocab_size=vocab_size), folder)
