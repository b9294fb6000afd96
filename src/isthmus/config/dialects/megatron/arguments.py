"""Megatron-LM's arguments of one run, by their names in its code: as they are read, and as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from isthmus.config.dialects.megatron.known_args import (
    NEVER,
    SETTINGS,
    TABLES,
    is_default,
    is_neutral,
    kinds,
    name_of,
    near_flag,
    typed,
    untranslated,
    words_of,
)
from isthmus.config.dialects.translation import OptionRemark, Status, Translation, grouped
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError

DEFAULT = "not given: Megatron-LM's default"
"""Origin of a setting whose argument is not given."""


class Arguments:
    """The given arguments, and Megatron-LM's defaults for the others."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}
        self._implicit: set[str] = set()
        self.errors: list[str] = []
        """Raised together."""

    def set(self, name: str, value: Any, source: str, *, implicit: bool = False) -> None:
        """Set ``name``; a later call wins.

        ``value`` is a plain value, or the words after a flag; ``source`` the argument as written. ``implicit`` values
        are defaults of another program, so no remark is made on them.
        """
        (self._implicit.add if implicit else self._implicit.discard)(name)
        kind = kinds().get(name)
        try:
            self._values[name] = value if kind is None else typed(kind[0], value)
        except ValueError as error:
            self.errors.append(f"{source}  {error}")
        self._sources[name] = source

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_explicit(self, name: str) -> bool:
        """Whether the argument is given for this run, not as a default of a program."""
        return self.has(name) and name not in self._implicit

    def get(self, name: str) -> Any:
        """The given value, or Megatron-LM's default."""
        value = self._values.get(name)
        return kinds()[name][1] if value is None else value

    def source(self, *names: str) -> str:
        return " ".join(self._sources[name] for name in names if self.has(name)) or DEFAULT

    def put(self, translation: Translation, *settings: str) -> None:
        """Translate settings that are one argument with the same value."""
        for setting in settings:
            translation.put(setting, self.get(SETTINGS[setting]), self.source(SETTINGS[setting]))

    def add_remarks(self, translation: Translation) -> None:
        """Add a remark for each argument without a setting, or an error if the run would differ without it."""
        remarks: list[OptionRemark] = []
        for name, value in self._values.items():
            if name in NEVER:
                translation.remark(self._sources[name], "mistake", NEVER[name])
            elif name in untranslated() and value is not None:
                status, why, neutral = untranslated()[name]
                if is_neutral(value, neutral):
                    continue
                if status == "refused":
                    self.errors.append(f"{self._sources[name]}  {why}")
                elif name not in self._implicit:
                    remarks.append(OptionRemark(self._sources[name], status, why))
        translation.remarks += grouped(remarks)

    def raise_errors(self) -> None:
        if len(self.errors) == 1:
            raise UsageError(self.errors[0])
        if self.errors:
            raise UsageError("\n  ".join([f"{len(self.errors)} arguments cannot be translated:", *self.errors]))


def read_flags(words: Sequence[str]) -> Arguments:
    """Read arguments of ``pretrain_gpt.py``, written as ``--flag value`` or ``--flag=value``."""
    args = Arguments()
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        position += 1
        if not flag.startswith("--") or len(flag) < 3:
            args.errors.append(f"{words[position - 1]}  is neither a flag nor the value of one")
            continue
        values = [value] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        source = " ".join([flag + (f"={value}" if equals else ""), *([] if equals else values)])
        name, fixed = name_of(flag[2:])
        if name is None:
            args.errors.append(f"{flag}  is not an argument of Megatron-LM{near_flag(flag)}")
        elif fixed is not None:
            args.set(name, fixed, source)
        else:
            args.set(name, values if name in kinds() else values or True, source)
    return args


class WrittenArguments:
    """The inverse of ``Arguments``: each ``write_*`` function is beside the ``put_*`` function that it inverts."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.remarks: list[OptionRemark] = []
        self._values: dict[str, Any] = {}
        self._expressed: set[str] = set()
        self._also_defaults: set[str] = set()

    def put(self, *settings: str) -> None:
        """Write settings that are one argument with the same value."""
        for setting in settings:
            value: Any = reduce(getattr, setting.split("."), self.config)
            self.set(SETTINGS[setting], value, setting)

    def set(self, name: str, value: Any, *settings: str, also_default: bool = False) -> None:
        """Write an argument, which expresses ``settings``; None leaves it out, and so does Megatron-LM's default unless
        ``also_default``."""
        self._values[name] = value
        if also_default:
            self._also_defaults.add(name)
        self._expressed.update(settings)

    def remark(self, setting: str, status: Status, reason: str) -> None:
        """``setting`` is expressed, but not exactly."""
        self._expressed.add(setting)
        self.remarks.append(OptionRemark(setting, status, reason))

    def words(self) -> Iterator[list[str]]:
        """Each flag with its words."""
        for name, value in self._values.items():
            if name in self._also_defaults or not is_default(name, value):
                yield words_of(name, value)

    def remark_on_the_rest(self) -> None:
        """Add a remark for each setting that differs from its default and that no argument expresses."""
        rest: list[OptionRemark] = []
        settings = self.config.model_dump(mode="json", exclude_defaults=True)
        for section, inner in settings.items():
            names = {f"{section}.{name}": value for name, value in inner.items()} if isinstance(inner, dict) else {}
            for name, value in (names or {section: inner}).items():
                if name not in self._expressed:
                    why = TABLES["unwritten"].get(name, "Megatron-LM has no such argument.")
                    rest.append(OptionRemark(f"{name}={value}", "unsupported", why))
        self.remarks += grouped(rest)
