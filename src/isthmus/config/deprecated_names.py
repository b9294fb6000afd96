"""Public names that were renamed: earlier names, the current ones, and the versions that warn and that refuse.

docs/reference/stability.md describes the rules. An entry stays in its table when a version refuses the name: the error
then names the current one, and run folders of earlier versions are read.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus import __version__
from isthmus.errors import UsageError


class DeprecatedName(FutureWarning):
    """A name was used that a later version refuses."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """The current name in place of an earlier one."""

    to: str
    since: str
    """The first version with the current name, such as 0.2.0."""
    refused_in: str
    """The first version that refuses the earlier name."""

    @property
    def is_refused(self) -> bool:
        return _numbers(__version__) >= _numbers(self.refused_in)

    def explain(self, name: str) -> str:
        """The text of the warning, or of the error."""
        refused = "" if self.is_refused else f" and will be refused from version {self.refused_in} on"
        return f"{name} was renamed to {self.to} in version {self.since}{refused}; write {self.to}"


SETTINGS: dict[str, Renamed] = {}
"""Settings by their dotted name, such as ``train.steps``."""
COMMANDS: dict[str, Renamed] = {}
"""Commands and options as in docs/reference/public-names.json, such as ``convert --dtype``; to a name of that form."""
PYTHON: dict[str, Renamed] = {}
"""Names of the package ``isthmus``, such as ``load_model``."""
METRICS: Mapping[str, str] = {"learned_tokens": "loss_tokens"}
"""Keys of ``metrics.jsonl``, which are read without a warning: nobody writes this file by hand."""


def warn(name: str, renamed: Renamed, where: str = "") -> None:
    """Warn once for each place about an earlier name."""
    warnings.warn(DeprecatedName(f"{where}  {renamed.explain(name)}".strip()), stacklevel=3)


def current_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings, by dotted name, with their current names."""
    return {SETTINGS[name].to if name in SETTINGS else name: value for name, value in values.items()}


def current_words(argv: Sequence[str]) -> list[str]:
    """The words of a command line with current names.

    Raises:
        UsageError: this version refuses an earlier name.
    """
    words = list(argv)
    for name, renamed in COMMANDS.items():
        *verb, last = name.split()
        if not last.startswith("-"):
            verb.append(last)
        if words[: len(verb)] != verb:
            continue
        end = words.index("--") if "--" in words else len(words)
        if last.startswith("-"):
            option = renamed.to.split()[-1]
            places = [place for place in range(end) if words[place].partition("=")[0] == last]
            changed = {place: option + words[place].removeprefix(last) for place in places}
        else:
            changed, words[: len(verb)] = {0: renamed.to.split()[0]}, renamed.to.split()
        if changed and renamed.is_refused:
            raise UsageError(f"isthmus {renamed.explain(name)}.")
        if changed:
            warn(f"isthmus {name}", renamed)
        words = [changed.get(place, word) for place, word in enumerate(words)]
    return words


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
