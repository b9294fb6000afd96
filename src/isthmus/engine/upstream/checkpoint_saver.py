"""The async saver of Megatron-LM calls torch's ``_write_item`` without arguments that newer torch requires.

torch 2.7 added ``transforms`` and torch 2.8 ``serialization_format``. Megatron-LM before core 0.13 passes neither or
only the first; commits of ROCm's fork bind ``transforms`` to the function, and some of them pass it again. Every
checkpoint then fails with ``_write_item() missing 1 required positional argument: 'serialization_format'``.

This file imports only the standard library, since the startup hook runs it alone in processes without Isthmus.
"""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Callable
from typing import Any

MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"
PATCHED = "# >>> isthmus patch checkpoint-saver"
"""Opens the lines that a static patch adds to the file."""


class UnknownSaver(Exception):
    """The source calls ``_write_item`` in a way that no known version of Megatron-LM does."""


def _write_item(*args: object, **_from_newer_megatron: object) -> object:
    """Call torch's _write_item with the arguments of this torch: 2.7 added transforms, 2.8 serialization_format."""
    import importlib
    import inspect

    torch_filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")
    required = inspect.signature(torch_filesystem._write_item).parameters
    *_, stream, data, write_item, storage_key = args
    kwargs = {"stream": stream, "data": data, "write_item": write_item, "storage_key": storage_key}
    if "transforms" in required:
        kwargs["transforms"] = args[0] if len(args) > 4 else torch_filesystem._StorageWriterTransforms()
    if "serialization_format" in required:
        kwargs["serialization_format"] = torch_filesystem.SerializationFormat.TORCH_SAVE
    return torch_filesystem._write_item(**kwargs)


def find_fault(source: str) -> str | None:
    """What is wrong in the source of :data:`MODULE`, or None if it works with every torch.

    Raises:
        UnknownSaver: it is not the saver of a known version.
    """
    if PATCHED in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise UnknownSaver(f"it is not valid Python ({error})") from error
    nodes = list(ast.walk(tree))
    if not any(imports_write_item(node) for node in tree.body):
        raise UnknownSaver("it does not import _write_item of torch.distributed.checkpoint.filesystem")
    if any(isinstance(node, ast.FunctionDef) and node.name == "_write_item" for node in tree.body):
        raise UnknownSaver("it defines a _write_item of its own")
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_write_item(node.func)]
    if not calls:
        raise UnknownSaver("it does not call _write_item")
    for call in calls:
        passed = [ast.unparse(argument) for argument in call.args]
        if passed[-2:] != ["write_item", "storage_key"] or passed[:-4] not in ([], ["*transform_list"]):
            raise UnknownSaver(f"line {call.lineno} passes other arguments: {ast.unparse(call)}")
    if not all(call.keywords for call in calls):
        return "_write_item() is called without serialization_format, which torch 2.8 and newer require"
    if any(isinstance(node, ast.Assign) and any(map(_is_write_item, node.targets)) for node in nodes):
        return "_write_item() is called with transforms twice with torch 2.7 and newer"
    return None


def imports_write_item(node: ast.stmt) -> bool:
    """It is ``from torch.distributed.checkpoint.filesystem import _write_item``, maybe with other names."""
    if not isinstance(node, ast.ImportFrom) or node.module != "torch.distributed.checkpoint.filesystem":
        return False
    return any(alias.name == "_write_item" and alias.asname is None for alias in node.names)


def _is_write_item(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "_write_item"


def patch_module(module: Any, say: Callable[[str], None] = lambda line: None) -> None:
    """Replace ``_write_item`` in the loaded :data:`MODULE` if it has the fault; for use right after its import.

    ``say`` gets a line if so. A saver without the fault, or of an unknown version (a warning names the reason), stays
    as it is. Forked processes inherit the fix; processes that multiprocessing spawns need a call of their own.
    """
    try:
        fault = find_fault(inspect.getsource(module))
    except (OSError, UnknownSaver) as error:
        logging.getLogger(__name__).warning("%s is not fixed: %s.", module.__file__, error)
        return
    if fault is not None:
        module._write_item = _write_item
        say(f"async saver: {fault}; fixed")
