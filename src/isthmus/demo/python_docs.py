"""A real instruction set that every machine has: the documentation of the installed Python.

The standard library's sources are parsed, not imported, so nothing of it runs; built-in modules, which have no source,
are asked for their docstrings. The same Python gives the same entries in the same order.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from isthmus.errors import IOFailure

# Modules that say little about programming, or whose docstrings are not prose.
_LEFT_OUT = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "test", "lib2to3", "ensurepip"}
_LEFT_OUT |= {"pydoc_data", "__phello__", "__hello__", "site-packages", "encodings", "config-3", "lib-dynload"}
_BUILTIN_MODULES = ("builtins", "math", "cmath", "itertools", "time", "sys", "gc", "array", "zlib", "unicodedata")
_SHORTEST, _LONGEST = 40, 1200
_QUESTIONS = (
    "What does `{name}` do in Python?",
    "Explain `{name}`.",
    "How does Python's `{name}` work?",
    "Describe `{name}` from the Python standard library.",
)


@dataclass(frozen=True, slots=True)
class DocEntry:
    """One documented thing: a module, class, function, method or language topic."""

    name: str
    signature: str
    """``name(arguments)`` where known, else the name."""
    question: str
    answer: str

    @property
    def document(self) -> str:
        """The entry as plain text."""
        return f"{self.signature}\n\n{self.answer}\n"


def python_documentation(limit: int = 3000) -> list[DocEntry]:
    """Up to ``limit`` entries, no two with the same answer, in an order that mixes the library well."""
    entries: dict[str, DocEntry] = {}
    for name, signature, doc in _everything():
        answer = _shortened(inspect.cleandoc(doc))
        if len(answer) < _SHORTEST or answer in entries:
            continue
        question = _QUESTIONS[_number(name) % len(_QUESTIONS)].format(name=name)
        entries[answer] = DocEntry(name, signature, question, answer)
    return sorted(entries.values(), key=lambda entry: (_number(entry.name), entry.name))[:limit]


def write_chats(entries: Sequence[DocEntry], path: Path | str) -> None:
    """Write one question and its answer a line, as ``messages``."""
    _write(
        path,
        (
            {"messages": [{"role": "user", "content": e.question}, {"role": "assistant", "content": e.answer}]}
            for e in entries
        ),
    )


def write_texts(entries: Sequence[DocEntry], path: Path | str) -> None:
    """Write one document a line, as ``text``."""
    _write(path, ({"text": entry.document} for entry in entries))


def _write(path: Path | str, records: Iterator[dict[str, object]]) -> None:
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    except OSError as error:
        raise IOFailure(f"{path}: cannot be written: {error.strerror or error}.") from error


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")


def _everything() -> Iterator[tuple[str, str, str]]:
    """(name, signature, text) of all that is documented."""
    for topic, text in sorted(topics.items()):
        yield f"the topic {topic.lower()}", topic, re.sub(r"\A.*\n\*{3,}\n+", "", text)
    for module in _BUILTIN_MODULES:
        yield from _of_builtin(module)
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if any(part in _LEFT_OUT or part.startswith(("_", "test", "config-")) for part in _package(parts)):
            continue
        yield from _of_source(path, ".".join(_package(parts)))


def _package(parts: tuple[str, ...]) -> tuple[str, ...]:
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def _of_source(path: Path, module: str) -> Iterator[tuple[str, str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old docstrings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # a file that this Python cannot parse documents nothing
    if doc := ast.get_docstring(tree):
        yield module, module, doc
    yield from _of_body(tree.body, module)


def _of_body(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, str, str]]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        name, doc = f"{owner}.{node.name}", ast.get_docstring(node)
        if doc:
            yield name, name if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})", doc
        if isinstance(node, ast.ClassDef):
            yield from _of_body(node.body, name)


def _of_builtin(module: str) -> Iterator[tuple[str, str, str]]:
    try:
        owner = importlib.import_module(module)
    except ImportError:
        return  # an optional part that this Python was built without
    for name, member in sorted(vars(owner).items()):
        if name.startswith("_") or not callable(member):
            continue
        full = name if owner is builtins else f"{module}.{name}"
        yield from _of_object(full, member)
        if isinstance(member, type) and not issubclass(member, BaseException):
            for attribute, method in sorted(vars(member).items()):
                if not attribute.startswith("_") and callable(method):
                    yield from _of_object(f"{full}.{attribute}", method)


def _of_object(name: str, member: object) -> Iterator[tuple[str, str, str]]:
    doc = getattr(member, "__doc__", None)
    if not isinstance(doc, str):
        return
    try:
        arguments = str(inspect.signature(member))  # type: ignore[arg-type]  # refused at run time, below
    except (TypeError, ValueError):
        arguments = ""
    # A default that is an object would show its address, another one in each process.
    yield name, name + ("" if " at 0x" in arguments else arguments), doc


def _shortened(text: str) -> str:
    """Whole paragraphs from the start, as many as fit."""
    if len(text) <= _LONGEST:
        return text.strip()
    cut = text.rfind("\n\n", 0, _LONGEST)
    return text[:cut].strip() if cut > 0 else ""
