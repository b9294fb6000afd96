"""YAML 1.2 as plain values, with the line and column of each key; size, depth and aliases are bounded."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode
from ruamel.yaml.representer import SafeRepresenter

from isthmus.files.input_files import MAX_DEPTH

Key = tuple[str, ...]
"""Parts of a setting's dotted name."""

TEXT_BYTES = 1 << 20
"""Largest config file; reading one takes about 5 seconds."""
_MAX_MAPPINGS = 16
"""Most levels of nested mappings in a config file."""
_MAX_NODES = 100_000
"""Most values of a text; an alias counts as all that it stands for, since a few lines of them can mean billions."""
_MAX_DIGITS = 100


class Syntax(Exception):
    """The text is not YAML, or not a mapping of settings. Line and column count from 1."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.column = column


def _reader() -> YAML:
    # "safe": plain values only. "pure": ruamel's own parser, the only one for YAML 1.2.
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    reader.max_depth = MAX_DEPTH
    return reader


def read_value(text: str) -> Any:
    """The value of YAML text such as ``2e-5``, ``true`` or ``[a.json, b.json]``."""
    return _read(text)[0]


def read_mapping(text: str) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    """The values, and the line and column (from 1) of each key. Repeated keys and non-text keys raise Syntax."""
    values, places = _parsed(text)
    return copy.deepcopy(values), dict(places)


@lru_cache(maxsize=128)  # a plan or a grid of layouts reads the same presets again and again
def _parsed(text: str) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    value, root = _read(text)
    if value is None:
        return {}, {}
    if not isinstance(value, dict):
        raise Syntax("a config file must be a mapping of settings, such as `train: {steps: 100}`", 1, 1)
    places: dict[Key, tuple[int, int]] = {}
    _walk(root, (), places)
    return value, places


def _read(text: str) -> tuple[Any, Any]:
    """The value, and the node that it was constructed from."""
    if len(text) > TEXT_BYTES:
        raise Syntax(f"more than {TEXT_BYTES >> 20} MiB of text")
    reader = _reader()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root = reader.compose(io.StringIO(text))
            if root is None:
                return None, None
            _count(root, {})
            return reader.constructor.construct_document(root), root
    except RecursionError:
        raise Syntax(f"more than {MAX_DEPTH} levels are nested") from None
    except (YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:  # ruamel raises all of these
        raise _as_syntax(error) from error


def _count(node: Any, counts: dict[int, int]) -> int:
    """The number of values below a node, each alias expanded."""
    if not isinstance(node, CollectionNode):
        return 1
    place = (node.start_mark.line + 1, node.start_mark.column + 1)
    if id(node) not in counts:
        counts[id(node)] = 0  # while it is counted
        children = itertools.chain(*node.value) if isinstance(node, MappingNode) else node.value
        counts[id(node)] = 1 + sum(_count(child, counts) for child in children)
    elif not counts[id(node)]:
        raise Syntax("an alias stands for a value that contains it", *place)
    if counts[id(node)] > _MAX_NODES:
        raise Syntax(f"more than {_MAX_NODES:,} values, with those that aliases stand for", *place)
    return counts[id(node)]


def _walk(node: Any, prefix: Key, places: dict[Key, tuple[int, int]]) -> None:
    if not isinstance(node, MappingNode):
        return
    for key, value in node.value:
        place = (key.start_mark.line + 1, key.start_mark.column + 1)
        if not str(key.tag).endswith((":str", ":merge")):
            raise Syntax(f"key {str(key.value)[:60]!r} must be text; put it in quotes", *place)
        if len(prefix) == _MAX_MAPPINGS:
            raise Syntax(f"more than {_MAX_MAPPINGS} nested mappings", *place)
        path = (*prefix, key.value)
        places[path] = place
        _walk(value, path, places)


def _as_syntax(error: Exception) -> Syntax:
    if type(error).__name__ == "MaxDepthExceededError":  # which ruamel.yaml before 0.19 does not have
        return Syntax(f"more than {MAX_DEPTH} levels are nested")
    if not isinstance(error, MarkedYAMLError):
        return Syntax(next(iter(str(error).splitlines()), type(error).__name__))
    # Later lines are advice to programmers.
    reason = ", ".join(part.splitlines()[0] for part in (error.context, error.problem) if part)
    mark = error.problem_mark or error.context_mark
    return Syntax(reason, *((mark.line + 1, mark.column + 1) if mark else ()))


def write_mapping(values: Mapping[str, Any]) -> str:
    """YAML that 1.1 and 1.2 readers read as the same values, in order."""
    writer = _reader()
    writer.Representer = _Representer
    writer.default_flow_style = False
    writer.width = 120
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    writer.dump(dict(values), text)
    return text.getvalue()


class _Constructor(SafeConstructor):
    """Dates are text: a folder may be named by a date."""

    def construct_yaml_int(self, node: Any) -> Any:
        """Python prints no integer of more than 4300 digits, and pydantic takes none."""
        if len(node.value) > _MAX_DIGITS:
            raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
        return super().construct_yaml_int(node)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)
_Constructor.add_constructor("tag:yaml.org,2002:int", _Constructor.construct_yaml_int)


class _Representer(SafeRepresenter):
    def represent_float(self, data: float) -> Any:
        """YAML 1.1 requires a point in numbers with an exponent."""
        text = repr(data)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)


_Representer.add_representer(float, _Representer.represent_float)
