"""Text spans with loss, and their token masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""[start, end) in characters."""
MaskedIds = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""Token ids, and a mask with 1 where the token has loss."""


def turn_end(text: str, span: Span, specials: tuple[str, ...], turn_token: str | None) -> int:
    """The end of an assistant turn in ``span``: after its end token, before text that the template adds.

    A turn ends with special tokens and blanks (``<|call_end|><|im_end|>``, ``<|end|> <|endoftext|>``). Its end is after
    the last ``turn_token`` of these; without one, after the last special token; without any, the end of the span.
    """
    start, end = span
    closing: list[tuple[str, int]] = []
    while True:
        end = start + len(text[start:end].rstrip())
        if not text.endswith(specials, start, end):
            break
        token = next(special for special in specials if text.endswith(special, start, end))
        closing.append((token, end))
        end -= len(token)
    return next((stop for token, stop in closing if token == turn_token), closing[0][1] if closing else span[1])


def following(text: str, position: int, token: str | None) -> int | None:
    """The end of ``token`` if it follows ``position`` after optional blanks, else None."""
    if token is None:
        return None
    at = position + len(text[position:]) - len(text[position:].lstrip())
    return at + len(token) if text.startswith(token, at) else None


def merged(spans: Sequence[Span]) -> list[Span]:
    """Sorted, with touching spans merged and empty spans removed."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def shared_prefix(*texts: str) -> str:
    first, last = min(texts), max(texts)
    if last.startswith(first):
        return first
    return first[: next(k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)]


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.uint8]:
    """1 for each token that overlaps a span.

    A token across a span's edge has loss: the model must generate it. A token of width zero (the prefix space of a
    sentencepiece model) belongs to the next character.
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    if not len(offsets):
        return mask
    array = np.asarray(offsets, dtype=np.int64)
    first, last = array[:, 0], np.maximum(array[:, 1], array[:, 0] + 1)
    for start, end in spans:
        mask |= ((first < end) & (last > start)).astype(np.uint8)
    return mask
