"""Stretches of text to be learned, their ends, and the tokens that lie in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""First character, and the one after the last."""


def turn_end(text: str, span: Span, specials: tuple[str, ...], turn_token: str | None) -> int:
    """Where an assistant's turn ends inside ``span``: after its turn-ending token, before what a template adds.

    A turn closes with special tokens and blanks (``<|call_end|><|im_end|>``, ``<|end|> <|endoftext|>``). Of these
    the last ``turn_token`` is the end; without one among them, the last special token; with none at all, the
    whole span.
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
    """The end of ``token`` where it comes next after ``position``, blanks aside; None where it does not."""
    if token is None:
        return None
    at = position + len(text[position:]) - len(text[position:].lstrip())
    return at + len(token) if text.startswith(token, at) else None


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same characters in order, with spans that touch made one and empty ones left out."""
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
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    if last.startswith(first):
        return first
    return first[: next(k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)]


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.uint8]:
    """1 for each token that shares a character with a span, else 0.

    A token across a span's edge counts as learned: the model has to produce it to get across. A token without width
    (a word mark that a sentencepiece model puts before a text) belongs to the character it stands before.
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    if not len(offsets):
        return mask
    array = np.asarray(offsets, dtype=np.int64)
    first, last = array[:, 0], np.maximum(array[:, 1], array[:, 0] + 1)
    for start, end in spans:
        mask |= ((first < end) & (last > start)).astype(np.uint8)
    return mask
