"""A bare sentencepiece ``tokenizer.model`` to a fast tokenizer that agrees with sentencepiece token for token.

Done here for models like Llama 2's: byte-pair pieces, text taken as it stands. Each stretch of text between special
tokens is tokenized as sentencepiece would tokenize it alone, the word mark before it included.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isthmus.errors import DataError, UsageError

_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def read_sentencepiece(file: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a file such as ``tokenizer.model``, and of ``tokenizer_config.json`` beside it.

    None when it is of another kind, which transformers may know.

    Raises:
        UsageError: the sentencepiece package is not installed.
        DataError: the file is cut short.
    """
    proto = _parse(file)
    if proto is None:
        return None
    spec = proto.normalizer_spec
    plain = spec.name == "identity" and not spec.remove_extra_whitespaces and not spec.precompiled_charsmap
    if proto.trainer_spec.model_type != _BPE or not plain or proto.trainer_spec.treat_whitespace_as_suffix:
        return None
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    unknown = next((piece.piece for piece in proto.pieces if piece.type == _UNKNOWN), None)
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(proto, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(proto.trainer_spec.byte_fallback),
        )
    )
    replace = normalizers.Replace(" ", "▁")
    prefixed = spec.add_dummy_prefix
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixed else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    named = _named_tokens(file.parent, proto)
    for piece in proto.pieces:
        if piece.type in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED:
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=False)])
    if (bos := named.get("bos_token")) is not None:
        # The models trained with these tokenizers begin every text with it.
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    build: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    return build(tokenizer_object=backend, unk_token=unknown, **named)


def _merges(proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, the pieces with the best score first, as sentencepiece does."""
    found = []
    for piece in proto.pieces:
        if piece.type != _NORMAL:
            continue
        word = piece.piece
        halves = [(word[:k], word[k:]) for k in range(1, len(word)) if word[:k] in vocab and word[k:] in vocab]
        found += [(-piece.score, vocab[a], vocab[b], a, b) for a, b in halves]
    # Within one piece the order of its halves decides nothing: both lead to the same piece.
    found.sort(key=lambda merge: merge[:1])
    return [(a, b) for *_, a, b in found]


def _named_tokens(folder: Path, proto: Any) -> dict[str, str]:
    """Which control pieces begin and end a text: the model's own, unless tokenizer_config.json names others."""
    spec = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    numbers = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "pad_token": spec.pad_id}
    named = {key: pieces[number] for key, number in numbers.items() if 0 <= number < len(pieces)}
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            values = json.loads(config.read_bytes())
        except ValueError as error:
            raise DataError(f"{config}: not JSON: {error}.") from error
        for key in numbers:
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str) and value in pieces:
                named[key] = value
        if isinstance(values.get("chat_template"), str):
            named["chat_template"] = values["chat_template"]
    template = folder / "chat_template.jinja"
    if template.is_file():
        named["chat_template"] = template.read_text(encoding="utf-8")
    return named


def _parse(path: Path) -> Any:
    """The model's protobuf message; None when the file is something else (tiktoken ranks, for one)."""
    raw = path.read_bytes()
    if not raw.startswith(b"\n"):  # field 1, the pieces: how every sentencepiece model begins
        return None
    try:
        messages = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise UsageError(
            f"{path} is a sentencepiece model. Install what reads it: pip install 'isthmus[sentencepiece]'."
        ) from error
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(raw)
    except Exception as error:  # protobuf's DecodeError, without importing protobuf for its name
        raise DataError(f"{path}: not a whole sentencepiece model: {error}. Is it cut short?") from error
    return proto if len(proto.pieces) else None
