"""Refuses pickles that cost the unpickler time or memory out of proportion to their length."""

from __future__ import annotations

from isthmus.errors import DataError

_MOST_LEVELS = 100
"""Limit of tuples in tuples: the hash of a key follows them on the C stack."""
_MOST_ELEMENTS, _MOST_ELEMENTS_PER_BYTE = 1_000_000, 50
"""Limits of the elements of all tuples, nested ones counted at each use: the hash of a key visits them each time."""
_SIZED = {**dict.fromkeys(b"UC\x8a\x8c", 1), **dict.fromkeys(b"TBX\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
"""Operations with an argument behind its length, and the bytes of that."""
_FIXED = {**dict.fromkeys(range(256), 0), **dict.fromkeys(b"Khq\x80\x82", 1), **dict.fromkeys(b"M\x83", 2)}
_FIXED |= {**dict.fromkeys(b"Jjr\x84", 4), **dict.fromkeys(b"G\x95", 8), **_SIZED}
"""Bytes of the argument, or of its length."""
_LINES = {**dict.fromkeys(b"ILFSVPgp", 1), **dict.fromkeys(b"ci", 2)}
"""Operations with arguments that are lines."""
_TAKES = {**dict.fromkeys(b"ab0Q", 1), **dict.fromkeys(b"sR\x81\x93", 2), 0x92: 3, 0x85: 1, 0x86: 2, 0x87: 3}
_TAKES |= dict.fromkeys(b"ldtoiue1\x90\x91", 0)
"""Operations that take values from the stack; 0 for those since the last mark."""
_PUSHES_NONE = frozenset(b"abs0ue1\x90")
_TUPLES = frozenset(b"t\x85\x86\x87")
_PUT, _GET, _NEITHER = frozenset(b"qrp\x94"), frozenset(b"hjg2"), frozenset(b"\x80\x95\x98")
_MARK, _POP, _MEMOIZE, _STOP = ord("("), ord("0"), 0x94, ord(".")
_LEVEL_BITS = 7


def check_pickle(raw: bytes) -> None:
    """Raise DataError for a place in the memo beyond the pickle, and for tuples nested beyond the bounds.

    One flipped bit can ask for a memo of 32 GiB, and 40 tuples of two can have 2^40 elements.
    """
    try:
        _follow(raw)
    except (IndexError, ValueError):  # its end, or what the unpickler refuses
        return


def _follow(raw: bytes) -> None:
    """Follow the stack of the unpickler: of a tuple its elements and levels, 0 for other values."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    at, remaining = 0, _MOST_ELEMENTS + _MOST_ELEMENTS_PER_BYTE * len(raw)
    while (code := raw[at]) != _STOP:
        start = at + 1
        at = start + _FIXED[code]
        if code in _SIZED:
            at += int.from_bytes(raw[start:at], "little")
        elif code in _LINES:
            for _ in range(_LINES[code]):
                at = raw.index(b"\n", at) + 1
        if code in _PUT:
            place = len(memo) if code == _MEMOIZE else _place(raw[start:at], code)
            if place > len(raw):
                raise DataError(f"its pickle of {len(raw)} bytes has a memo of {place} places")
            memo[place] = stack[-1]
        elif code in _GET:
            stack.append(memo.get(_place(raw[start:at], code), 0) if start < at else stack[-1])
            remaining -= stack[-1] >> _LEVEL_BITS
        elif code == _MARK:
            marks.append(len(stack))
        elif code == _POP and marks and marks[-1] == len(stack):
            marks.pop()
        elif code not in _TAKES:
            stack += () if code in _NEITHER else (0,)
        else:
            first = len(stack) - _TAKES[code] if _TAKES[code] else marks.pop()
            nested = _tuple(stack[first:]) if code in _TUPLES else 0
            remaining -= nested >> _LEVEL_BITS
            stack[first:] = () if code in _PUSHES_NONE else (nested,)
        if remaining < 0:
            raise DataError(f"its pickle of {len(raw)} bytes has too many tuples in tuples")


def _place(argument: bytes, code: int) -> int:
    return int(argument) if code in b"pg" else int.from_bytes(argument, "little")


def _tuple(items: list[int]) -> int:
    levels = 1
    elements = 1 + len(items)
    for item in items:
        if item:
            elements += item >> _LEVEL_BITS
            levels = max(levels, 1 + item % (1 << _LEVEL_BITS))
    if levels > _MOST_LEVELS:
        raise DataError(f"its pickle has more than {_MOST_LEVELS} levels of tuples in tuples")
    return elements << _LEVEL_BITS | levels
