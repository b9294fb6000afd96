"""The variables of a shell script as they were given: in its environment, or as ``KEY=VALUE`` behind its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from isthmus.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SETTING = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)+|out|platform")
"""What names a setting of a config file and no variable."""


class Variables:
    """What was said, and all that is wrong with it. An empty value counts as none, as ``${NAME:-default}`` has it."""

    def __init__(
        self,
        known: Collection[str],
        environment: Mapping[str, str],
        arguments: Sequence[str],
        *,
        exported: Iterable[str],
    ) -> None:
        """Sort the words.

        Args:
            known: the script's variables.
            environment: those of them that are in it count, unless an argument says the same one.
            arguments: ``NAME=VALUE``: variables, settings of a config file, or ``exported``.
            exported: names, or beginnings of names that end in ``_``, that are for the libraries below.

        Raises:
            UsageError: an argument is none of these.
        """
        self.known = frozenset(known)
        self.given = {name: environment[name] for name in sorted(self.known) if environment.get(name)}
        self.settings: dict[str, str] = {}
        """By dotted name, in YAML."""
        self.exports: dict[str, str] = {}
        """Environment variables that were given as arguments."""
        self.wrong: list[str] = []
        self._asked: set[str] = set()
        for word in arguments:
            name, equals, value = word.partition("=")
            if not equals:
                self.wrong.append(f"{word}: wanted NAME=VALUE")
            elif _SETTING.fullmatch(name):
                self.settings[name] = value
            elif name in self.known:
                self.given[name] = value
                if not value:
                    del self.given[name]
            elif any(name == one or (one.endswith("_") and name.startswith(one)) for one in exported):
                self.exports[name] = value
            else:
                self.wrong.append(f"{word}: the script has no variable {name}{self._guess(name)}")

    def near_misses(self, environment: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
        """Variables of the environment that are none of the script's, and the one of its own that may be meant.

        Args:
            environment: all of it.
            others: what related scripts call variables that this one has under another name.
        """
        found = {name: meant for name, meant in others.items() if environment.get(name) and name not in self.known}
        for name in sorted(environment):
            if len(name) < 5 or name in self.known or name in found or not name.isupper() or not environment[name]:
                continue
            if near := difflib.get_close_matches(name, self.known, n=1, cutoff=0.88):
                found[name] = near[0]
        return found

    def says(self, name: str) -> bool:
        """Whether the variable was given."""
        return self._value(name) is not None

    def said(self, name: str, default: object = None) -> str:
        """``NAME=VALUE``, or what the script takes by itself."""
        return f"{name}={self.given[name]}" if name in self.given else f"{name}={default}, the script's default"

    def text(self, name: str, default: str) -> str:
        """The value as it is."""
        value = self._value(name)
        return default if value is None else value

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number; 32.0 is one, since tools that divide batches write it so."""
        value = self._value(name)
        if value is None:
            return default
        if not re.fullmatch(r"-?[0-9]+(\.0+)?", value) or int(float(value)) < least:
            self.wrong.append(f"{name}={value}: wanted a whole number of {least} or more")
            return default
        return int(float(value))

    def switch(self, name: str, default: bool) -> bool:
        """0 or 1."""
        value = self._value(name)
        if value not in (None, "0", "1"):
            self.wrong.append(f"{name}={value}: wanted 0 or 1")
        return default if value is None else value == "1"

    def one_of(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of some words."""
        value = self.text(name, default)
        if value not in choices:
            self.wrong.append(f"{name}={value}: wanted {' or '.join(choices)}")
            return default
        return value

    def unasked(self) -> list[str]:
        """What was given and nothing has asked for, as ``NAME=VALUE``: beside the others it says nothing."""
        return [self.said(name) for name in sorted(self.given.keys() - self._asked)]

    def refuse(self, name: str, why: str) -> None:
        """Note that a value cannot be honoured."""
        self.wrong.append(f"{name}={self.given.get(name, '')}: {why}")

    def check(self, script: str) -> None:
        """Raise all that is wrong.

        Raises:
            UsageError: there is something.
        """
        wrong = list(dict.fromkeys(self.wrong))
        if len(wrong) == 1:
            raise UsageError(f"{script}: {wrong[0]}{'' if wrong[0].endswith('?') else '.'}")
        if wrong:
            raise UsageError("\n  ".join([f"{script}: {len(wrong)} things are wrong:", *wrong]))

    def _value(self, name: str) -> str | None:
        self._asked.add(name)
        return self.given.get(name)

    def _guess(self, name: str) -> str:
        near = difflib.get_close_matches(name.upper(), self.known, n=1)
        if near:
            return f"; did you mean {near[0]}?"
        return " (settings of a config file have a section, such as train.steps=50)" if _NAME.fullmatch(name) else ""
