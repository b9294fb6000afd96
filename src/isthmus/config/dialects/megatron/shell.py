"""A shell script in words: enough of the shell's grammar to read the scripts that start a training.

What a word stands for is not decided here; see :mod:`isthmus.config.dialects.megatron.script`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.errors import UsageError

_END = frozenset("\n;&|()<>")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!]")
_SPECIAL_IN_QUOTES = frozenset('"$`\\\n')


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word."""

    kind: str
    """``text``; ``variable``, the inside of ``${...}``; ``sum``, that of ``$((...))``; ``command``, of ``$(...)``."""
    text: str
    quoted: bool


@dataclass(slots=True)
class Word:
    """A word as it is written; ``NAME=(`` begins an array, whose words are ``items``."""

    line: int
    parts: list[Part] = field(default_factory=list)
    items: list[Word] | None = None

    @property
    def plain(self) -> str | None:
        """Its text, if nothing in it stands for anything else."""
        return "".join(part.text for part in self.parts) if all(part.kind == "text" for part in self.parts) else None


@dataclass(slots=True)
class Command:
    """Words up to the end of a line, or to ``;``, ``&`` or ``|``."""

    line: int
    words: list[Word]
    after: str
    """What ended the command before it: a new line, ``;``, ``&&``, ``||``, ``|``, ``&``, ``(`` or ``)``."""


def read_script(text: str, first_line: int = 1) -> Iterator[Command]:
    """The commands of a script, in their order, those within others too.

    Raises:
        UsageError: a quote or a bracket is not closed.
    """
    return _Reader(text, first_line).commands()


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text = text.replace("\r\n", "\n").replace("\\\n", "\x00")
        # A continued line counts, and is nothing.
        self.position, self.line = 0, line
        self.endings: list[str] = []
        """Of here documents that begin after this line."""

    def commands(self) -> Iterator[Command]:
        words: list[Word] = []
        after, start = "\n", self.line
        while True:
            self._skip()
            if not words:
                start = self.line
            here = self._peek()
            if here and here not in _END:
                words.append(self._word())
                continue
            if here in ("<", ">") or (here == "&" and self._peek(2) == "&>"):
                self._redirection(words)
                continue
            if words:
                yield Command(start, words, after)
            if not here:
                return
            words, after = [], self._operator()

    def _peek(self, count: int = 1) -> str:
        return self.text[self.position : self.position + count]

    def _next(self) -> str:
        here = self._peek()
        self.position += 1
        self.line += here in ("\n", "\x00")
        return here

    def _skip(self) -> None:
        """White space, continued lines and comments."""
        while (here := self._peek()) and here in " \t\x00":
            self._next()
        if here == "#":
            while self._peek() not in ("", "\n"):
                if self._peek() == "\x00":  # a backslash at the end of a comment continues nothing
                    self.text = f"{self.text[: self.position]}\n{self.text[self.position + 1 :]}"
                    return
                self._next()

    def _operator(self) -> str:
        for operator in ("&&", "||", "|&", ";;"):
            if self._peek(2) == operator:
                self.position += 2
                return operator
        operator = self._next()
        while operator == "\n" and self.endings:
            ending, start = self.endings.pop(0), self.line
            while (text := self._rest_of_line()).strip() != ending:
                if not self._peek() and not text:
                    raise UsageError(f"line {start}: the here document never ends with {ending!r}.")
        return operator

    def _rest_of_line(self) -> str:
        found = ""
        while (here := self._next()) not in ("", "\n"):
            found += here
        return found

    def _redirection(self, words: list[Word]) -> None:
        if words and (words[-1].plain or "").isdigit() and self.text[self.position - 1].isdigit():
            words.pop()  # 2> is no word
        if self._peek(2) == "<<" and self._peek(3) != "<<<":
            self.position += 2 + (self._peek(3) == "<<-")
            self._skip()
            self.endings.append(self._word().plain or "")
            return
        while self._peek() and self._peek() in "<>&|":
            self._next()
        self._skip()
        if self._peek() and self._peek() not in _END:
            self._word()

    def _word(self) -> Word:
        word = Word(self.line)
        plain = ""

        def put(part: Part | None = None) -> None:
            nonlocal plain
            if plain:
                word.parts.append(Part("text", plain, False))
            plain = ""
            if part is not None:
                word.parts.append(part)

        while (here := self._peek()) and here not in _END and here not in " \t\x00":
            if here == "'":
                self._next()
                put(Part("text", self._until("'").replace("\x00", "\\\n"), True))
            elif here == '"':
                put()
                word.parts += self._quoted()
            elif here == "\\":
                self._next()
                put(Part("text", self._next(), True))
            elif here in "$`":
                put(self._substitution(quoted=False))
            else:
                plain += self._next()
        put()
        if self._peek() == "(" and (word.plain or "").endswith(("=", "+=")):
            self._next()
            word.items = list(self._items())
        return word

    def _items(self) -> Iterator[Word]:
        """Words of an array up to its bracket."""
        start = self.line
        while True:
            self._skip()
            here = self._peek()
            if not here:
                raise UsageError(f"line {start}: the bracket ( is never closed.")
            if here == ")":
                self._next()
                return
            if here == "\n":
                self._next()
            elif here in _END:
                raise UsageError(f"line {self.line}: {here!r} within an array is not read.")
            else:
                yield self._word()

    def _until(self, end: str) -> str:
        start, found = self.line, ""
        while self._peek(len(end)) != end:
            if not self._peek():
                raise UsageError(f"line {start}: {end} is missing.")
            found += self._next()
        self.position += len(end)
        return found

    def _quoted(self) -> Iterator[Part]:
        start = self.line
        self._next()
        plain, any_part = "", False
        while (here := self._peek()) != '"':
            if not here:
                raise UsageError(f'line {start}: the quote " is never closed.')
            if here in "$`":
                if plain:
                    yield Part("text", plain, True)
                plain, any_part = "", True
                yield self._substitution(quoted=True)
            elif here == "\x00":
                self._next()
            elif here == "\\":
                self._next()
                after = self._next()
                plain += after if after in _SPECIAL_IN_QUOTES else f"\\{after}"
            else:
                plain += self._next()
        self._next()
        if plain or not any_part:
            yield Part("text", plain, True)

    def _substitution(self, *, quoted: bool) -> Part:
        if self._next() == "`":
            return Part("command", self._until("`"), quoted)
        if self._peek(2) == "((":
            self.position += 2
            return Part("sum", self._until("))"), quoted)
        if self._peek() == "(":
            return Part("command", self._closed("(", ")"), quoted)
        if self._peek() == "{":
            return Part("variable", self._closed("{", "}"), quoted)
        if (name := _NAME.match(self.text, self.position)) is None:
            return Part("text", "$", quoted)
        self.position = name.end()
        return Part("variable", name.group(), quoted)

    def _closed(self, opening: str, closing: str) -> str:
        """What is between two brackets, others of their kind within them."""
        start, found, depth = self.line, "", 0
        while True:
            here = self._next()
            if not here:
                raise UsageError(f"line {start}: the bracket {opening} is never closed.")
            depth += (here == opening) - (here == closing)
            if depth == 0:
                return found[1:]
            found += here
