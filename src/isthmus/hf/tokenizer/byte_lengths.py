"""Loss masks from the byte length of each token, or from the tokens at the edges of each span, without all offsets.

Byte lengths suffice if the tokens concatenate to the text. Two kinds of tokenizers qualify: byte-level BPE (GPT-2,
Llama 3, Qwen, DeepSeek), and sentencepiece BPE with byte fallback (Llama 2, Mistral, Gemma), which writes spaces as
word marks and may add one before a text.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from isthmus.data.chat.loss_spans import Span

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
WordMark = Literal["never", "first", "always"]
_MARK = "▁"
_SPACES_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
_MARK_BEFORE = {"type": "Prepend", "prepend": _MARK}


@dataclass(frozen=True, slots=True)
class ByteLengths:
    """Number of bytes that each token covers."""

    token_lengths: npt.NDArray[np.int64]
    """[largest id + 1], in bytes of UTF-8."""
    is_added: npt.NDArray[np.bool_]
    """[largest id + 1], whether it is an added token, which is matched first and splits the text."""
    word_mark: WordMark
    """Where a word mark is added: nowhere, before the first part between added tokens, or before every part."""
    composes: bool
    """Whether the tokenizer normalizes to NFC, so that only normalized text keeps its bytes."""

    @classmethod
    def of(cls, backend: Backend) -> ByteLengths | None:
        """The lengths of a tokenizer; None if it does not qualify."""
        model, added = backend.model, backend.get_added_tokens_decoder()
        if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        if any(token.lstrip or token.rstrip for token in added.values()):
            return None
        vocab = backend.get_vocab(with_added_tokens=False)
        normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
        word_mark: WordMark | None
        if writes_bytes := isinstance(backend.decoder, decoders.ByteLevel):
            plain = normalizer is None or normalizer["type"] == "NFC"
            word_mark = "never" if plain and _keeps_all(pre_tokenizer) else None
            needed = set(pre_tokenizers.ByteLevel.alphabet())
            vocab_lengths = list(map(len, vocab))
        else:
            word_mark = _word_mark(normalizer, pre_tokenizer) if model.byte_fallback else None
            byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
            needed = byte_tokens | {_MARK}
            vocab_lengths = [1 if token in byte_tokens else _size_of_marked(token) for token in vocab]
            if word_mark != "never" and any(_MARK in token.content for token in added.values()):
                return None  # ambiguous: an added token, or one of the model with a mark
        if word_mark is None or not vocab.keys() >= needed:
            return None
        lengths = np.zeros(max([*vocab.values(), *added]) + 1, dtype=np.int64)
        lengths[list(vocab.values())] = vocab_lengths
        for number, token in added.items():
            # A token that is matched in normalized text has marks instead of spaces there.
            marked = token.normalized and not writes_bytes
            size = _size_of_marked(token.content) if marked else len(token.content.encode())
            # If the model has it too, with other bytes, the shorter counts: then a sum can only be too small.
            lengths[number] = min(size, lengths[number]) if token.content in vocab else size
        is_added = np.zeros(len(lengths), dtype=np.bool_)
        is_added[list(added)] = True
        return cls(lengths, is_added, word_mark, normalizer == {"type": "NFC"})

    def masks(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], ids: Ids, counts: Sequence[int]
    ) -> tuple[Mask, list[int]]:
        """Loss mask: 1 for each token that overlaps with one of the ``spans`` (characters) of its text.

        ``ids`` [total] are the tokens of all texts, ``counts`` [n] their numbers. Returns the mask [total], and the
        indices of texts whose lengths do not add up; their mask is wrong.
        """
        bounds = np.cumsum([0, *counts])
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._lengths(ids, bounds))])
        begins = ends[bounds[:-1]]
        sizes = np.fromiter((len(text) if text.isascii() else len(text.encode()) for text in texts), np.int64)
        # All errors (a space counted as an added mark, a mark in the text) make the sum too small.
        completes = ends[bounds[1:]] - begins == sizes
        edges, wrong = [], []
        for number, (text, text_spans, begin, complete) in enumerate(
            zip(texts, spans, begins.tolist(), completes.tolist(), strict=True)
        ):
            narrow = text.isascii()
            if not complete or (self.composes and not narrow and not unicodedata.is_normalized("NFC", text)):
                wrong.append(number)
                continue
            for start, end in text_spans:
                if not narrow:
                    start, end = len(text[:start].encode()), len(text[:end].encode())
                edges.append((begin + start, begin + end))
        byte_spans = np.array(edges, dtype=np.int64).reshape(-1, 2)
        # A token without width, a lone mark, counts as covering the next character.
        last = np.maximum(ends[1:], ends[:-1] + 1)
        covered = np.zeros(len(ends), dtype=np.int64)
        np.add.at(covered, np.searchsorted(last, byte_spans[:, 0], side="right"), 1)
        np.subtract.at(covered, np.searchsorted(ends[:-1], byte_spans[:, 1], side="left"), 1)
        return (np.cumsum(covered[:-1]) > 0).view(np.uint8), wrong

    def _lengths(self, ids: Ids, bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[total], without the marks that the tokenizer adds."""
        lengths = self.token_lengths[ids]
        if self.word_mark == "never" or not len(ids):
            return lengths
        firsts = np.zeros(len(ids), dtype=np.bool_)
        firsts[bounds[:-1][bounds[:-1] < bounds[1:]]] = True
        added = self.is_added[ids]
        if self.word_mark == "always":
            firsts[1:] |= added[:-1]
        return lengths - (firsts & ~added)


def _state(part: Any) -> dict[str, Any] | None:
    """The configuration of a tokenizer component; None for one that does nothing."""
    state = None if part is None else json.loads(part.__getstate__())
    empty = ({"type": "Sequence", "normalizers": []}, {"type": "Sequence", "pretokenizers": []})
    return None if state in empty else state


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether it only splits the text, and maps bytes to characters in the last step."""
    if pre_tokenizer is None:
        return False
    *cuts, last = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return (
        last["type"] == "ByteLevel"
        and not last["add_prefix_space"]
        and all(cut["type"] == "Digits" or (cut["type"] == "Split" and cut["behavior"] != "Removed") for cut in cuts)
    )


def _word_mark(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> WordMark | None:
    """Where a mark is added; None if the text is changed in other ways than spaces becoming marks."""
    if normalizer is None:
        if pre_tokenizer is None or pre_tokenizer["type"] != "Metaspace" or pre_tokenizer["replacement"] != _MARK:
            return None
        scheme: WordMark = pre_tokenizer["prepend_scheme"]
        return scheme
    if pre_tokenizer is not None and (
        pre_tokenizer["type"] != "Split"
        or pre_tokenizer.get("behavior") not in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    ):
        return None
    if normalizer == _SPACES_TO_MARKS:
        return "never"
    return "always" if normalizer.get("normalizers") == [_MARK_BEFORE, _SPACES_TO_MARKS] else None


def _size_of_marked(token: str) -> int:
    return len(token.replace(_MARK, " ").encode())


def tokens_of(encoding: Encoding, span: Span) -> slice | None:
    """The tokens that overlap with ``span``, as in :func:`isthmus.data.chat.loss_spans.token_mask`.

    Looks up one token at each edge and tries its neighbours, since several tokens may cover one character, or none.
    None if no token covers the character at an edge.
    """
    first, last = encoding.char_to_token(span[0]), encoding.char_to_token(span[1] - 1)
    if first is None or last is None:
        return None

    def chars(token: int) -> Span:
        """A token without width counts as covering the next character."""
        start, end = encoding.token_to_chars(token) or (0, 0)
        return start, max(end, start + 1)

    while first and chars(first - 1)[1] > span[0]:
        first -= 1
    while last < len(encoding) and chars(last)[0] < span[1]:
        last += 1
    return slice(first, last)
