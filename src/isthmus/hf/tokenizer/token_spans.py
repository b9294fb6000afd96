"""Which tokens stand for a stretch of a text, found without listing the characters of all tokens."""

from __future__ import annotations

from tokenizers import Encoding

from isthmus.data.chat.loss_spans import Span


def tokens_of(encoding: Encoding, span: Span) -> slice | None:
    """The tokens that share a character with ``span``, as :func:`isthmus.data.chat.loss_spans.token_mask` counts them.

    One token at each edge is looked up and its neighbours are tried, since several tokens may stand for one character,
    or for none. None where the text has a character at an edge that no token stands for.
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
    assert chars is not None  # of a token that there is
    return chars


def _start(encoding: Encoding, token: int) -> int:
    return _chars(encoding, token)[0]


def _end(encoding: Encoding, token: int) -> int:
    """A token without width belongs to the character that it stands before."""
    start, end = _chars(encoding, token)
    return max(end, start + 1)
