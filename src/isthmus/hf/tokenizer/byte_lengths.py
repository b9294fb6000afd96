"""Tokenizers whose tokens, end to end, are the bytes of the text: their lengths alone tell where each token lies.

Such a tokenizer need not keep the places of tokens, which takes it a tenth of its time or more. Two forms are known:
byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek), whose vocabulary writes a byte as a character, and sentencepiece's BPE
with bytes for what it does not know (Llama 2, Mistral, Gemma), which writes blanks as word marks and may put one more
before a text.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from isthmus.data.chat.loss_spans import Span

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
WordMark = Literal["never", "first", "always"]
_MARK = "▁"
_BLANKS_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
_MARK_BEFORE = {"type": "Prepend", "prepend": _MARK}


@dataclass(frozen=True, slots=True)
class ByteLengths:
    """How many bytes of a text each token of such a tokenizer stands for."""

    of_token: npt.NDArray[np.int64]
    """[largest id + 1], in bytes of UTF-8."""
    is_added: npt.NDArray[np.bool_]
    """[largest id + 1], whether a token is looked for before all else, and cuts the text."""
    word_mark: WordMark
    """Whether a mark that is not in the text comes before it: before the first stretch between added tokens, or all."""
    composes: bool
    """Whether text is first brought into NFC, so that only text that is in it keeps its bytes."""

    @classmethod
    def of(cls, backend: Backend) -> ByteLengths | None:
        """Those of a tokenizer of either form; None for any other."""
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
            of_vocab = list(map(len, vocab))
        else:
            word_mark = _word_mark(normalizer, pre_tokenizer) if model.byte_fallback else None
            of_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
            needed = of_bytes | {_MARK}
            of_vocab = [1 if token in of_bytes else _size_of_marked(token) for token in vocab]
            if word_mark != "never" and any(_MARK in token.content for token in added.values()):
                return None  # nothing tells whether the first token was added, or made by the model with a mark
        if word_mark is None or not vocab.keys() >= needed:
            return None
        lengths = np.zeros(max([*vocab.values(), *added]) + 1, dtype=np.int64)
        lengths[list(vocab.values())] = of_vocab
        for number, token in added.items():
            # One that is looked for in normalized text stands there with marks for blanks.
            marked = token.normalized and not writes_bytes
            size = _size_of_marked(token.content) if marked else len(token.content.encode())
            # Where the model makes it as well, of other bytes, it counts as the shorter: then a sum may be too small.
            lengths[number] = min(size, lengths[number]) if token.content in vocab else size
        is_added = np.zeros(len(lengths), dtype=np.bool_)
        is_added[list(added)] = True
        return cls(lengths, is_added, word_mark, normalizer == {"type": "NFC"})

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
            The mask [total], and the numbers of texts for which it is not right, since lengths do not tell.
        """
        bounds = np.cumsum([0, *counts])
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._lengths(ids, bounds))])
        begins = ends[bounds[:-1]]
        sizes = np.fromiter((len(text) if text.isascii() else len(text.encode()) for text in texts), np.int64)
        # All that may be misjudged (a blank taken for a mark that was put, a mark in the text) makes a sum too small.
        wholes = ends[bounds[1:]] - begins == sizes
        edges, wrong = [], []
        for number, (text, learned, begin, whole) in enumerate(
            zip(texts, spans, begins.tolist(), wholes.tolist(), strict=True)
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
        # A token without width, a mark alone, belongs to the character it stands before.
        last = np.maximum(ends[1:], ends[:-1] + 1)
        covered = np.zeros(len(ends), dtype=np.int64)
        np.add.at(covered, np.searchsorted(last, stretches[:, 0], side="right"), 1)
        np.subtract.at(covered, np.searchsorted(ends[:-1], stretches[:, 1], side="left"), 1)
        return (np.cumsum(covered[:-1]) > 0).view(np.uint8), wrong

    def _lengths(self, ids: Ids, bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[total], with the marks that are not in the texts taken off."""
        lengths = self.of_token[ids]
        if self.word_mark == "never" or not len(ids):
            return lengths
        firsts = np.zeros(len(ids), dtype=np.bool_)
        firsts[bounds[:-1][bounds[:-1] < bounds[1:]]] = True
        added = self.is_added[ids]
        if self.word_mark == "always":
            firsts[1:] |= added[:-1]
        return lengths - (firsts & ~added)


def _state(part: Any) -> dict[str, Any] | None:
    """What a part of a tokenizer says of itself; None for one that does nothing."""
    state = None if part is None else json.loads(part.__getstate__())
    empty = ({"type": "Sequence", "normalizers": []}, {"type": "Sequence", "pretokenizers": []})
    return None if state in empty else state


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether all it does is to cut a text, and at last to write its bytes as characters."""
    if pre_tokenizer is None:
        return False
    *cuts, last = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return (
        last["type"] == "ByteLevel"
        and not last["add_prefix_space"]
        and all(cut["type"] == "Digits" or (cut["type"] == "Split" and cut["behavior"] != "Removed") for cut in cuts)
    )


def _word_mark(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> WordMark | None:
    """When a mark comes before a text; None where more is done to it than blanks being written as marks."""
    if normalizer is None:
        if pre_tokenizer is None or pre_tokenizer["type"] != "Metaspace" or pre_tokenizer["replacement"] != _MARK:
            return None
        scheme: WordMark = pre_tokenizer["prepend_scheme"]
        return scheme
    if pre_tokenizer is not None and (pre_tokenizer["type"], pre_tokenizer.get("behavior")) not in (
        ("Split", "Isolated"), ("Split", "MergedWithPrevious"), ("Split", "MergedWithNext"), ("Split", "Contiguous"),
    ):  # fmt: skip
        return None
    if normalizer == _BLANKS_TO_MARKS:
        return "never"
    return "always" if normalizer.get("normalizers") == [_MARK_BEFORE, _BLANKS_TO_MARKS] else None


def _size_of_marked(token: str) -> int:
    return len(token.replace(_MARK, " ").encode())
