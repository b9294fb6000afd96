"""The static patch of Megatron-LM's async saver: adds a function to the file, or removes it."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import io
import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from isthmus.engine.upstream.checkpoint_saver import (
    MODULE,
    PATCHED,
    UnknownSaver,
    _write_item,
    find_fault,
    imports_write_item,
)
from isthmus.errors import DataError, MissingInput
from isthmus.files.atomic_write import atomic_file

_BLOCK = re.compile(
    rf"\n\n{re.escape(PATCHED)} (?P<digest>\w+); --revert removes it\n(?P<body>.*?)# <<< isthmus patch\n", re.DOTALL
)


@dataclass(frozen=True)
class SaverPatch:
    """The file before and after a patch; ``fault`` is None if no change is needed."""

    file: Path
    before: str
    after: str
    fault: str | None

    @property
    def changes(self) -> bool:
        return self.before != self.after

    @property
    def unchanged(self) -> str:
        """Why there is no change."""
        return "patched already" if PATCHED in self.before else "not patched, it does not have the fault"

    def diff(self, root: Path) -> str:
        """In the format of git, relative to the checkout."""
        name = self.file.relative_to(root).as_posix()
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))

    def write(self) -> None:
        """Replace the file atomically."""
        target = self.file.resolve()
        with atomic_file(target) as temporary:
            temporary.write_bytes(self.after.encode())
            shutil.copymode(target, temporary)


def plan_patch(megatron: Path) -> SaverPatch:
    """What fixes the saver of a checkout, or of any other folder that contains ``megatron``.

    Raises:
        MissingInput: the folder does not contain Megatron-LM's async saver.
        DataError: the saver differs from those of all known versions, or the patch in it was edited.
    """
    file, source = _read(megatron)
    if _applied(file, source) is not None:
        return SaverPatch(file, source, source, None)
    try:
        fault = find_fault(source)
    except UnknownSaver as error:
        raise DataError(
            f"{file} is not the async saver of a known Megatron-LM: {error}. It was not changed. Compare it with the "
            "file of its release."
        ) from error
    return SaverPatch(file, source, source if fault is None else _add_block(source), fault)


def plan_revert(megatron: Path) -> SaverPatch:
    """What removes the patch from a checkout; raises as :func:`plan_patch`."""
    file, source = _read(megatron)
    block = _applied(file, source)
    after = source if block is None else source[: block.start()] + source[block.end() :]
    return SaverPatch(file, source, after, None)


def _read(megatron: Path) -> tuple[Path, str]:
    file = megatron / (MODULE.replace(".", "/") + ".py")
    if not file.is_file():
        raise MissingInput(
            f"{megatron} has no async saver ({file.relative_to(megatron)}). Name the root of a checkout of Megatron-LM "
            "core 0.6 or newer, or the site-packages folder with megatron-core."
        )
    try:
        return file, file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: {error}. Restore it from Megatron-LM.") from error


def _applied(file: Path, source: str) -> re.Match[str] | None:
    """The lines that an earlier patch added."""
    block = _BLOCK.search(source)
    if block is None and PATCHED not in source:
        return None
    if block is None or block["digest"] != _digest(block["body"]):
        raise DataError(
            f"{file}: the lines of the patch were edited. Restore the file with git checkout, then patch it."
        )
    return block


def _add_block(source: str) -> str:
    """Add the function after the imports, since ROCm's fork binds its name between them."""
    body = ast.parse(source).body
    first = next(index for index, node in enumerate(body) if imports_write_item(node))
    header = itertools.takewhile(lambda node: not isinstance(node, ast.ClassDef | ast.FunctionDef), body[first:])
    imports = [node for node in header if isinstance(node, ast.Import | ast.ImportFrom | ast.Try)]
    lines = io.StringIO(source, newline="").readlines()
    function = inspect.getsource(_write_item)
    block = f"\n\n{PATCHED} {_digest(function)}; --revert removes it\n{function}# <<< isthmus patch\n"
    end = imports[-1].end_lineno
    return "".join(lines[:end]) + block + "".join(lines[end:])


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:12]
