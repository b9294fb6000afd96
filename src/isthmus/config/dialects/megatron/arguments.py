"""Megatron-LM's arguments by the names that its own code has for them, whoever said them and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.config.dialects.megatron.known_args import fates, kinds, name_of, near_flag, says_nothing, typed
from isthmus.config.dialects.megatron.spelling import NEVER
from isthmus.config.dialects.translation import Translation
from isthmus.errors import UsageError

DEFAULT = "not said: Megatron-LM's default"
"""The origin of a setting that nothing was said about."""


class Arguments:
    """What was said, with Megatron-LM's defaults for the rest."""

    def __init__(self) -> None:
        """Nothing was said."""
        self._values: dict[str, Any] = {}
        self._words: dict[str, str] = {}
        self._quiet: set[str] = set()
        self.complaints: list[str] = []
        """All that is wrong with them, to be told at once."""

    def say(self, name: str, value: Any, words: str, *, quiet: bool = False) -> None:
        """``name`` is ``value``, a plain value or the words of a flag, since ``words`` say so; the later word wins.

        With ``quiet`` no remark is made on it: nobody said it of this run.
        """
        (self._quiet.add if quiet else self._quiet.discard)(name)
        kind = kinds().get(name)
        try:
            self._values[name] = value if kind is None else typed(kind[0], value)
        except ValueError as error:
            self.complaints.append(f"{words}  {error}")
        self._words[name] = words

    def said(self, name: str) -> bool:
        """Whether anything was said about it; null says nothing."""
        return self._values.get(name) is not None

    def said_of_this_run(self, name: str) -> bool:
        """Whether it was said of this run, and is no default of some program's."""
        return self.said(name) and name not in self._quiet

    def get(self, name: str) -> Any:
        """The value that was said, or Megatron-LM's default."""
        value = self._values.get(name)
        return kinds()[name][1] if value is None else value

    def words(self, *names: str) -> str:
        """What was said about them, as it was said."""
        return " ".join(self._words[name] for name in names if self.said(name)) or DEFAULT

    def remark_on_the_rest(self, translation: Translation) -> None:
        """A remark for the arguments that no setting has, a complaint for one without which it were another run."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, value in self._values.items():
            if name in NEVER:
                translation.remark(self._words[name], "mistaken", NEVER[name])
            elif name in fates() and value is not None:
                fate, why, neutral = fates()[name]
                if says_nothing(value, neutral):
                    continue
                if fate == "refused":
                    self.complaints.append(f"{self._words[name]}  {why}")
                elif name not in self._quiet:
                    alike.setdefault((fate, why), []).append(self._words[name])
        for (fate, why), said in alike.items():
            translation.remark(", ".join(said), fate, why)  # type: ignore[arg-type]

    def refuse_if_wrong(self) -> None:
        """Raise all complaints.

        Raises:
            UsageError: there are some.
        """
        if len(self.complaints) == 1:
            raise UsageError(self.complaints[0])
        if self.complaints:
            raise UsageError("\n  ".join([f"{len(self.complaints)} arguments cannot be:", *self.complaints]))


def read_flags(words: Sequence[str]) -> Arguments:
    """The arguments that a command line gives to ``pretrain_gpt.py``, in either spelling of its values."""
    found = Arguments()
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        position += 1
        if not flag.startswith("--") or len(flag) < 3:
            found.complaints.append(f"{words[position - 1]}  is no flag, nor the value of one")
            continue
        values = [value] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        said = " ".join([flag + (f"={value}" if equals else ""), *([] if equals else values)])
        name, fixed = name_of(flag[2:])
        if name is None:
            found.complaints.append(f"{flag}  is no argument of Megatron-LM{near_flag(flag)}")
        elif fixed is not None:
            found.say(name, fixed, said)
        elif name in kinds():
            found.say(name, values, said)
        else:
            found.say(name, values or True, said)
    return found
