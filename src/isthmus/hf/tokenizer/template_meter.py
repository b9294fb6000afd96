"""Counts what the rendering of a chat template makes, and its time.

Each loop iteration, call, filter and operator counts its result, before it is made where it may be much larger than its
operands. Lists have a deep size, so that those which share their parts cannot grow exponentially when they are printed
or compared.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import thread_time
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

TIME_S = 5.0
"""CPU time of rendering one conversation once."""
SIZE = 1 << 30
"""Characters that one rendering may make in total; an element of a list counts as 8."""
VALUE_SIZE = 1 << 25
"""Characters and elements of one value and all its parts; a part that occurs twice counts twice."""
_OPERATION, _LOOK_EVERY = 50, 1 << 18
"""Characters that an operation counts as, and after which the clock is read."""
_NUMBER = 10_000
"""The largest width, indentation or count in an argument, and length of a text where time may be quadratic."""
_BITS = 1 << 14
_KEPT = 200
"""Bytes of a known size."""
_STRING_BYTES = 80
"""Bytes of a short text in a list."""
_WITH_NUMBERS = frozenset("batch center expandtabs indent ljust rjust round slice tojson zfill".split())
_WITH_SHORT_TEXTS = frozenset("int rfind rindex rpartition rsplit tojson".split())
_CHARACTER_METHODS = frozenset("batch dictsort list map reject select slice sort unique".split())
GROWING = (
    _WITH_NUMBERS | _WITH_SHORT_TEXTS | _CHARACTER_METHODS | {"format", "join", "replace", "split", "splitlines", "sum"}
)
"""Filters and methods whose cost or result is not linear in their operands."""
_WIDE_PERCENT = re.compile(r"%[-#0 +]*\*|\)[-#0 +]*\*[a-z]|\.\*|\d{5,}")
_WIDE_FORMAT = re.compile(r":[^{}:]{0,40}(\d{5,}|\{)")
_SEQUENCES = (str, list, tuple)
_OPERATORS = SandboxedEnvironment.default_binop_table


class TemplateLimit(Exception):
    """The template needs more time or memory than a rendering may, or uses something that has no bound."""


class TemplateMeter:
    """What the current rendering has used."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a rendering."""
        self._remaining, self._began_s = SIZE, thread_time()
        self._look_at = SIZE - _LOOK_EVERY
        self._sizes: dict[int, tuple[int, Any]] = {}

    def spend(self, size: int = 0) -> None:
        """Count an operation on ``size`` characters; raises TemplateLimit beyond a limit."""
        self._remaining -= size + _OPERATION
        if self._remaining < self._look_at:
            self._look()

    def _look(self) -> None:
        if self._remaining < 0:
            raise TemplateLimit(f"makes more than {SIZE:,} characters for one conversation")
        if thread_time() - self._began_s > TIME_S:  # not the time that other processes took
            raise TemplateLimit(f"takes more than {TIME_S:g} s for one conversation")
        self._look_at = max(self._remaining - _LOOK_EVERY, 0)

    def size(self, value: Any) -> int:
        """The size of a value with its parts; known sizes are kept, since templates cannot change lists and dicts."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        if (known := self._sizes.get(id(value))) is not None:
            return known[0]
        total = 1
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            total += len(part) if type(part) is str else self.size(part)
            if total > VALUE_SIZE:
                raise TemplateLimit(f"makes a list of more than {VALUE_SIZE:,} characters")
        self._sizes[id(value)] = total, value  # keeps the value, so that no other one gets its id
        self.spend(_KEPT)
        return total

    def check_parts(self, parts: Iterable[Any]) -> None:
        """Before something that has these parts is made."""
        if sum(map(self.size, parts)) > VALUE_SIZE:
            raise TemplateLimit(f"makes a list of more than {VALUE_SIZE:,} characters")

    def listed(self, values: Iterable[Any], separator: int) -> list[Any]:
        """Values to join with a separator of so many characters."""
        items = list(values)
        self.expect(sum(map(self.size, items)) + len(items) * separator)
        return items

    def counted(self, value: Any) -> Any:
        """Count a new value, and return it."""
        if type(value) is str or isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(8 * len(value))
            self.size(value)
        elif isinstance(value, types.GeneratorType):
            return self._counted_items(value)
        return value

    def shown(self, value: Any) -> str:
        """The text of a value."""
        if type(value) is str:
            return value
        text = str(value)
        self.spend(len(text))
        return text

    def joined(self, texts: Iterable[str]) -> str:
        parts = list(texts)
        self.expect(sum(map(len, parts)))
        return str(self.counted("".join(parts)))

    def concatenated(self, parts: Iterable[Any]) -> str:
        """The operator ``~``."""
        return self.joined(map(self.shown, parts))

    def ticked(self, value: Any) -> Any:
        """Count a comparison, or a step of a loop."""
        self.spend(len(value) if type(value) is str else 0)
        return value

    def steps(self, values: Any) -> Any:
        """``values``, counted while a loop takes them."""
        return _Steps(self, values) if hasattr(type(values), "__len__") else self._counted_items(iter(values))

    def _counted_items(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            yield self.counted(value) if isinstance(value, list | tuple) else self.ticked(value)

    def operate(self, _: Any, operator: str, a: Any, b: Any) -> Any:
        """The result of a binary operator."""
        if operator == "+" and type(a) is str and type(b) is str:
            self.expect(len(a) + len(b))
            return a + b
        if operator == "+" and isinstance(a, _SEQUENCES):
            self.expect(self.size(a) + self.size(b))
        elif operator == "%" and isinstance(a, str):
            self._expect_format(a, "%", _WIDE_PERCENT, b)
        elif operator == "*":
            for sequence, times in ((a, b), (b, a)):
                if isinstance(sequence, _SEQUENCES) and isinstance(times, int):
                    self.expect(self.size(sequence) * times)
            if isinstance(a, int) and isinstance(b, int):
                _check_bits(a.bit_length() + b.bit_length())
        elif operator == "**" and isinstance(a, int) and isinstance(b, int):
            _check_bits(a.bit_length() * abs(b))
        return self.counted(_OPERATORS[operator](a, b))

    def formatted(self, template: str, plain: Callable[..., str]) -> Callable[..., str]:
        """``template.format``, with ``plain`` as its implementation."""

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._expect_format(template, "{", _WIDE_FORMAT, [*args, kwargs])
            return str(self.counted(plain(*args, **kwargs)))

        return bounded

    def _expect_format(self, template: str, mark: str, wide: re.Pattern[str], values: Any) -> None:
        if wide.search(template):
            raise TemplateLimit("pads a text to a width that is computed or very large")
        self.expect(len(template) + template.count(mark) * (self.size(values) + _NUMBER))

    def check(self, name: str, value: Any, arguments: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a filter or method in GROWING; raises TemplateLimit if its result would be too large."""
        values = [*arguments, *kwargs.values()]
        if name in _WITH_NUMBERS and any(isinstance(item, int) and abs(item) > _NUMBER for item in values):
            raise TemplateLimit(f"calls {name} with a number above {_NUMBER:,}")
        if name in _WITH_SHORT_TEXTS and any(self.size(item) > _NUMBER for item in values):
            raise TemplateLimit(f"calls {name} with a text of more than {_NUMBER:,} characters")
        if name == "int" and self.size(value) > _NUMBER:
            raise TemplateLimit(f"reads a number of more than {_NUMBER:,} digits")
        if name == "sum" and any(isinstance(item, list | tuple) for item in values):
            raise TemplateLimit("adds up lists, whose time has no bound")
        if isinstance(value, str):
            self.expect(self._size_after(name, value, values))
        elif name == "tojson":
            self.expect(self.size(value) * (1 + sum(item if type(item) is int else self.size(item) for item in values)))

    def _size_after(self, name: str, value: str, arguments: list[Any]) -> int:
        """An upper bound of what a filter or method makes of a text."""
        first = arguments[0] if arguments else None
        if name == "replace" and len(arguments) > 1:
            return len(value) + (value.count(str(first)) if first else len(value) + 1) * len(str(arguments[1]))
        if name in ("split", "rsplit", "splitlines"):
            parts = value.count(first) if isinstance(first, str) and first else len(value)
            return parts * _STRING_BYTES
        if name in ("indent", "expandtabs"):
            width = len(first) if isinstance(first, str) else first if isinstance(first, int) else 8
            return len(value) + (value.count("\n") + value.count("\t") + 1) * width
        return len(value) * (_STRING_BYTES if name in _CHARACTER_METHODS else 1)

    def expect(self, size: int) -> None:
        """Count a value of ``size`` before it is made."""
        if size > VALUE_SIZE:
            raise TemplateLimit(f"makes a text or a list of {size:,} characters")
        self.spend(size)


class _Steps:
    """Values of a loop, counted while it takes them; their number remains known."""

    def __init__(self, meter: TemplateMeter, values: Any) -> None:
        self._meter, self._values = meter, values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return map(self._meter.ticked, self._values)


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise TemplateLimit(f"computes an integer of {bits:,} bits")
