"""Documentation of the installed Python's standard library, parsed from source without importing."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["class", "exception", "function", "method"]
_SKIPPED = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "test", "tests", "lib2to3"}
_SKIPPED |= {"ensurepip", "distutils", "pydoc_data", "site-packages", "dist-packages", "encodings"}
_MAX_DOC_CHARS = 120
_EXCEPTION_ENDINGS = ("Error", "Exception", "Warning")


@dataclass(frozen=True, slots=True)
class DocEntry:
    module: str
    qualified_name: str
    """Name within the module: ``JSONDecoder.decode``."""
    kind: Kind
    parameters: tuple[str, ...]
    """Positional parameters without ``self`` and ``cls``; empty for classes and exceptions."""
    doc: str
    """Start of the docstring; empty if there is none."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualified_name}"

    @property
    def reference(self) -> str:
        """The name, with parentheses for functions and methods."""
        return f"{self.name}()" if self.kind in ("function", "method") else self.name

    @property
    def unit(self) -> str:
        """The top-level class or function."""
        return f"{self.module}.{self.qualified_name.partition('.')[0]}"

    @property
    def document(self) -> str:
        article, count = "an" if self.kind == "exception" else "a", len(self.parameters)
        has = f" It has {count} parameters: {', '.join(self.parameters)}." if count else ""
        return f"In Python, {self.reference} is {article} {self.kind} defined in {self.module}.{has}\n{self.doc}\n"


def stable_hash(text: str) -> int:
    """An integer that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def python_documentation() -> list[DocEntry]:
    """All public classes, functions and methods, in a fixed shuffled order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    entries: dict[str, DocEntry] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if any(part in _SKIPPED or part.startswith(("_", "config-", "lib-")) for part in parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old docstrings
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # a file that this Python cannot parse has no entries
        entries |= {entry.name: entry for entry in _entries(tree.body, ".".join(parts), owner="")}
    return sorted(entries.values(), key=lambda entry: stable_hash(entry.name))


def _entries(body: list[ast.stmt], module: str, owner: str) -> Iterator[DocEntry]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        name = owner + node.name
        doc = (ast.get_docstring(node) or "").partition("\n\n")[0][:_MAX_DOC_CHARS].strip()
        if isinstance(node, ast.ClassDef):
            bases = [node.name, *map(ast.unparse, node.bases)]
            is_exception = any(base.endswith(_EXCEPTION_ENDINGS) for base in bases)
            yield DocEntry(module, name, "exception" if is_exception else "class", (), doc)
            yield from _entries(node.body, module, f"{name}.")
        else:
            parameters = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
            is_bound = owner and parameters[:1] in (["self"], ["cls"])
            yield DocEntry(module, name, "method" if owner else "function", tuple(parameters[bool(is_bound) :]), doc)
