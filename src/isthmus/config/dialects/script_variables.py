"""Variables of a shell script, from the environment or from ``NAME=VALUE`` arguments."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from isthmus.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SETTING = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)+|out|platform")
"""Dotted settings of a config, which are not variables."""


class Variables:
    """The given variables and the errors about them. An empty value is not given, as in ``${NAME:-default}``."""

    def __init__(
        self,
        known: Collection[str],
        environment: Mapping[str, str],
        arguments: Sequence[str],
        *,
        exported: Iterable[str],
    ) -> None:
        """Arguments ``NAME=VALUE`` win over the environment: variables, dotted settings or ``exported`` names.

        ``exported``: names of variables for libraries, or prefixes that end in ``_``.
        """
        self.known: frozenset[str] = frozenset(known)
        self.values: dict[str, str] = {name: environment[name] for name in sorted(self.known) if environment.get(name)}
        self.settings: dict[str, str] = {}
        """Settings by dotted name, in YAML."""
        self.exports: dict[str, str] = {}
        """Environment variables given as arguments."""
        self.errors: list[str] = []
        self._read: set[str] = set()
        for word in arguments:
            name, equals, value = word.partition("=")
            if not equals:
                self.errors.append(f"{word}: expected NAME=VALUE")
            elif _SETTING.fullmatch(name):
                self.settings[name] = value
            elif name in self.known:
                self.values[name] = value
                if not value:
                    del self.values[name]
            elif any(
                name == known_name or (known_name.endswith("_") and name.startswith(known_name))
                for known_name in exported
            ):
                self.exports[name] = value
            else:
                self.errors.append(f"{word}: the script has no variable {name}{self._guess(name)}")

    def similar_variables(self, environment: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
        """Unknown variables and the similar variable of the script; ``others`` has names in related scripts."""
        similar = {name: meant for name, meant in others.items() if environment.get(name) and name not in self.known}
        for name in sorted(environment):
            if len(name) < 5 or name in self.known or name in similar or not name.isupper() or not environment[name]:
                continue
            if near := difflib.get_close_matches(name, self.known, n=1, cutoff=0.88):
                similar[name] = near[0]
        return similar

    def has(self, name: str) -> bool:
        return self._value(name) is not None

    def origin(self, name: str, default: object = None) -> str:
        """``NAME=VALUE``, as given or with the script's default."""
        return f"{name}={self.values[name]}" if name in self.values else f"{name}={default}, the script's default"

    def text(self, name: str, default: str) -> str:
        value = self._value(name)
        return default if value is None else value

    def integer(self, name: str, default: int, *, least: int = 1) -> int:
        """32.0 is accepted: scripts that divide numbers write it."""
        value = self._value(name)
        if value is None:
            return default
        if not re.fullmatch(r"-?[0-9]+(\.0+)?", value) or int(float(value)) < least:
            self.errors.append(f"{name}={value}: must be a whole number of {least} or more")
            return default
        return int(float(value))

    def positive(self, name: str) -> float | None:
        """A number above 0; None if it is not given."""
        value = self._value(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            self.errors.append(f"{name}={value}: must be a number above 0")
            return None
        return number

    def switch(self, name: str, default: bool) -> bool:
        """True for 1, False for 0."""
        value = self._value(name)
        if value not in (None, "0", "1"):
            self.errors.append(f"{name}={value}: must be 0 or 1")
        return default if value is None else value == "1"

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self.text(name, default)
        if value not in choices:
            self.errors.append(f"{name}={value}: must be {' or '.join(choices)}")
            return default
        return value

    def unused(self) -> list[str]:
        """``NAME=VALUE`` of the given variables that were never read, so they have no effect."""
        return [self.origin(name) for name in sorted(self.values.keys() - self._read)]

    def refuse(self, name: str, why: str) -> None:
        self.errors.append(f"{name}={self.values.get(name, '')}: {why}")

    def check(self, script: str) -> None:
        """Raise all errors in one UsageError."""
        errors = list(dict.fromkeys(self.errors))
        if len(errors) == 1:
            raise UsageError(f"{script}: {errors[0]}{'' if errors[0].endswith('?') else '.'}")
        if errors:
            raise UsageError("\n  ".join([f"{script}: {len(errors)} errors:", *errors]))

    def _value(self, name: str) -> str | None:
        self._read.add(name)
        return self.values.get(name)

    def _guess(self, name: str) -> str:
        near = difflib.get_close_matches(name.upper(), self.known, n=1)
        if near:
            return f"; did you mean {near[0]}?"
        return " (settings of a config file have a section, such as train.steps=50)" if _NAME.fullmatch(name) else ""
