"""YAML 1.2 as plain values, with the line and column of each key."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode
from ruamel.yaml.representer import SafeRepresenter

Key = tuple[str, ...]
"""Parts of a setting's dotted name."""

_MAX_DEPTH = 16
"""An alias can nest a mapping in itself."""


class Syntax(Exception):
    """The text is not YAML, or not a mapping of settings. Line and column count from 1."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line, self.column = reason, line, column


def _reader() -> YAML:
    # "safe": plain values only. "pure": ruamel's own parser, the only one for YAML 1.2.
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    return reader


def read_value(text: str) -> Any:
    """The value of YAML text such as ``2e-5``, ``true`` or ``[a.json, b.json]``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _reader().load(text)
    except (YAMLError, ValueError) as error:
        raise _as_syntax(error) from error


def read_mapping(text: str) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    """The values, and the line and column (from 1) of each key. Repeated keys and non-text keys raise Syntax."""
    value = read_value(text)
    if value is None:
        return {}, {}
    if not isinstance(value, dict):
        raise Syntax("a config file must be a mapping of settings, such as `train: {steps: 100}`", 1, 1)
    places: dict[Key, tuple[int, int]] = {}
    _walk(_reader().compose(io.StringIO(text)), (), places)
    return value, places


def _walk(node: Any, prefix: Key, places: dict[Key, tuple[int, int]]) -> None:
    if not isinstance(node, MappingNode):
        return
    for key, value in node.value:
        place = (key.start_mark.line + 1, key.start_mark.column + 1)
        if not key.tag.endswith((":str", ":merge")):
            raise Syntax(f"key {key.value!r} must be text; put it in quotes", *place)
        if len(prefix) == _MAX_DEPTH:
            raise Syntax(f"more than {_MAX_DEPTH} nested mappings", *place)
        path = (*prefix, key.value)
        places[path] = place
        _walk(value, path, places)


def _as_syntax(error: Exception) -> Syntax:
    if not isinstance(error, MarkedYAMLError):
        return Syntax(str(error).splitlines()[0])
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


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    def represent_float(self, data: float) -> Any:
        """YAML 1.1 requires a point in numbers with an exponent."""
        text = repr(data)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)


_Representer.add_representer(float, _Representer.represent_float)
