"""The conditions of a shell script, and which of its branches are taken."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from isthmus.config.dialects.megatron.expand import Unknown, Variables
from isthmus.config.dialects.megatron.shell import Word

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass(slots=True)
class Branch:
    """A block of commands that is done, not done, or nobody knows: a branch of ``if``, or a loop."""

    kind: str
    line: int
    condition: bool | None = None
    """What it has come to so far, None where nobody knows."""
    asked: bool = False
    asking: bool = False
    live: bool = False
    dead: bool = False
    taken: bool = False
    """Whether one of its branches was done."""

    def __post_init__(self) -> None:
        """An ``if`` begins with its condition; what is in braces is as what is around it."""
        self.asking = self.kind == "if"
        self.live = self.kind == "{"

    def hears(self, answer: bool | None, after: str) -> None:
        """A command of the condition, after what joins it to those before."""
        if not self.asked or after not in ("&&", "||"):
            self.condition = answer
        elif after == "&&" and self.condition is not False:
            self.condition = answer if self.condition else (False if answer is False else None)
        elif after == "||" and self.condition is not True:
            self.condition = answer if self.condition is False else (True if answer else None)
        self.asked = True

    def goes_on(self, word: str) -> None:
        """``then``, ``elif`` or ``else``: the next branch begins, or its condition."""
        if self.kind != "if":
            return
        if self.condition is None and self.asked:
            self.asking, self.live, self.dead = False, False, False  # nor does anybody know of those that follow
        elif word == "elif":
            self.asking, self.asked = True, False
            self.condition = None
        else:
            self.asking = False
            self.live = not self.taken and (word == "else" or self.condition is True)
            self.dead = not self.live
            self.taken |= self.live


def holds(words: Sequence[Word], variables: Variables) -> bool | None:
    """Whether a test such as ``[ "$A" = 1 ]`` or ``[[ -n $B ]]`` is true; None if that cannot be known."""
    negated = words[0].plain == "!"
    words = words[negated:]
    if len(words) < 3 or (words[0].plain, words[-1].plain) not in (("[", "]"), ("[[", "]]")):
        return None
    said: list[str] = []
    for word in words[1:-1]:
        value = variables.text_of(word, unset="")
        if isinstance(value, Unknown):
            return None
        said.append(value)
    found = _test(said, pattern=words[0].plain == "[[")
    return found if found is None else found != negated


def _test(said: list[str], *, pattern: bool) -> bool | None:
    match said:
        case ["!", *rest]:
            found = _test(rest, pattern=pattern)
            return None if found is None else not found
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right]:
            return fnmatchcase(left, right) if pattern else left == right
        case [left, "!=", right]:
            return not (fnmatchcase(left, right) if pattern else left == right)
        case [left, how, right] if how in _NUMBERS:
            try:
                return _NUMBERS[how](int(left), int(right))
            except ValueError:
                return None
    return None
