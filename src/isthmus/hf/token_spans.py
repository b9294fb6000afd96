"""Which tokens stand for stretches of a text, found without listing the characters of all tokens."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

Span = tuple[int, int]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


def tokens_of(encoding: Encoding, span: Span) -> slice | None:
    """The tokens that share a character with ``span``, as :func:`isthmus.data.spans.token_mask` counts them.

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


@dataclass(frozen=True, slots=True)
class ByteLengths:
    """A tokenizer whose tokens, end to end, are the bytes of the text: lengths alone tell where each one lies.

    The tokenizer then need not keep the places of tokens, which takes it a tenth of its time.
    """

    of_token: npt.NDArray[np.int64]
    """[largest id + 1], in bytes of UTF-8."""
    composes: bool
    """Whether the tokenizer first brings text into NFC, so that only text that is in it keeps its bytes."""

    @classmethod
    def of(cls, backend: Backend) -> ByteLengths | None:
        """Those of a byte-level BPE that adds nothing to a text and leaves nothing out; None for any other."""
        normalizer = backend.normalizer
        composes = type(normalizer) is normalizers.NFC
        added = backend.get_added_tokens_decoder()
        if not (
            isinstance(backend.model, models.BPE)
            and isinstance(backend.decoder, decoders.ByteLevel)
            and (composes or normalizer is None)
            and backend.pre_tokenizer is not None
            and _keeps_all(json.loads(backend.pre_tokenizer.__getstate__()))
            and not any(token.lstrip or token.rstrip for token in added.values())
        ):
            return None
        vocab = backend.get_vocab(with_added_tokens=False)
        if not vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
            return None
        lengths = np.zeros(max([*vocab.values(), *added]) + 1, dtype=np.int64)
        lengths[list(vocab.values())] = list(map(len, vocab))  # a byte is written as one character
        for number, token in added.items():
            lengths[number] = len(token.content.encode())
        return cls(lengths, composes)

    def masks(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], ids: Ids, counts: Sequence[int]
    ) -> tuple[Mask, list[int]]:
        """1 for each token that shares a character with one of its text's ``spans``, for texts end to end.

        Args:
            texts: [n].
            spans: [n], of characters.
            ids: [total], the tokens of all texts.
            counts: [n], tokens of each.

        Returns:
            The mask [total], and the numbers of texts for which it is not right, since their bytes are not kept.
        """
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.of_token[ids])])
        bounds, sizes = np.cumsum([0, *counts]), _sizes(texts)
        starts_of_texts = ends[bounds[:-1]]
        kept = ends[bounds[1:]] - starts_of_texts == sizes
        edges, wrong = [], []
        for number, (text, learned, begin, whole) in enumerate(
            zip(texts, spans, starts_of_texts.tolist(), kept.tolist(), strict=True)
        ):
            narrow = text.isascii()
            if not whole or (self.composes and not narrow and not unicodedata.is_normalized("NFC", text)):
                wrong.append(number)
                continue
            for start, end in learned:
                if not narrow:
                    start, end = len(text[:start].encode()), len(text[:end].encode())
                edges.append((begin + start, begin + end))
        stretches = np.array(edges, dtype=np.int64).reshape(-1, 2)
        covered = np.zeros(len(ends), dtype=np.int64)
        np.add.at(covered, np.searchsorted(ends[1:], stretches[:, 0], side="right"), 1)
        np.subtract.at(covered, np.searchsorted(ends[:-1], stretches[:, 1], side="left"), 1)
        return (np.cumsum(covered[:-1]) > 0).view(np.uint8), wrong


def _sizes(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """[n], bytes of UTF-8."""
    return np.fromiter((len(text) if text.isascii() else len(text.encode()) for text in texts), np.int64, len(texts))


def _keeps_all(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer only cuts a text, and writes its bytes as characters."""
    if part["type"] == "Sequence":
        parts = part["pretokenizers"]
        return parts[-1:] == [last for last in parts if last["type"] == "ByteLevel"] and all(map(_keeps_all, parts))
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    return part["type"] == "Digits" or (part["type"] == "Split" and part["behavior"] != "Removed")
