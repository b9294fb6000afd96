"""Finds the tokens of a character span without listing the characters of all tokens."""

from __future__ import annotations

from tokenizers import Encoding

from isthmus.data.chat.loss_spans import Span


def tokens_of(encoding: Encoding, span: Span) -> slice | None:
    """The tokens that overlap with ``span``, as in :func:`isthmus.data.chat.loss_spans.token_mask`.

    Looks up one token at each edge and tries its neighbours, since several tokens may cover one character, or none.
    None if no token covers the character at an edge.
    """
    start, end = span
    first = encoding.char_to_token(start)
    if first is None:
        return None
    while first and _end(encoding, first - 1) > start:
        first -= 1
    last = encoding.char_to_token(end - 1)
    if last is None:
        return None
    while last < len(encoding) and _start(encoding, last) < end:
        last += 1
    return slice(first, last)


def _chars(encoding: Encoding, token: int) -> Span:
    chars = encoding.token_to_chars(token)
    assert chars is not None
    return chars


def _start(encoding: Encoding, token: int) -> int:
    return _chars(encoding, token)[0]


def _end(encoding: Encoding, token: int) -> int:
    """A token without width counts as covering the next character."""
    start, end = _chars(encoding, token)
    return max(end, start + 1)
