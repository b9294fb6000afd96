"""Converts a sentencepiece ``tokenizer.model`` without ``tokenizer.json`` to a fast tokenizer with identical tokens.

Supported are BPE models without text normalization, such as Llama 2's. Text between special tokens is tokenized
separately, with the word mark that sentencepiece adds before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isthmus.errors import DataError, IsthmusError
from isthmus.extras import optional_package
from isthmus.hf.model_folder import read_json

_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def read_sentencepiece(file: Path) -> PreTrainedTokenizerBase | None:
    """Read ``tokenizer.model`` and the ``tokenizer_config.json`` next to it; None if it is not such a BPE model."""
    proto = parse_sentencepiece(file)
    if proto is None:
        return None
    try:
        return _build(file, proto)
    except IsthmusError:
        raise
    except Exception as error:  # protobuf and the tokenizers library raise bare exceptions
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file}: the tokenizer cannot be built: {reason}. Download it again.") from error


def _build(file: Path, proto: Any) -> PreTrainedTokenizerBase | None:
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
    special_tokens = _named_tokens(file.parent, proto)
    for piece in proto.pieces:
        if piece.type in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED:
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=False)])
    if (bos := special_tokens.get("bos_token")) is not None:
        # Models with these tokenizers are trained with BOS before every text.
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    build: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    return build(tokenizer_object=backend, unk_token=unknown, **special_tokens)


def _merges(proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, ordered by the score of the result, as in sentencepiece."""
    merges = []
    for piece in proto.pieces:
        if piece.type != _NORMAL:
            continue
        word = piece.piece
        halves = [(word[:k], word[k:]) for k in range(1, len(word)) if word[:k] in vocab and word[k:] in vocab]
        merges += [(-piece.score, vocab[a], vocab[b], a, b) for a, b in halves]
    # The order of the pairs of one piece is irrelevant: all form the same piece.
    merges.sort(key=lambda merge: merge[:1])
    return [(a, b) for *_, a, b in merges]


def _named_tokens(folder: Path, proto: Any) -> dict[str, str]:
    """BOS, EOS and padding tokens of the model, overridden by tokenizer_config.json, and the chat template."""
    spec = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    numbers = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "pad_token": spec.pad_id}
    tokens = {key: pieces[number] for key, number in numbers.items() if 0 <= number < len(pieces)}
    config = folder / "tokenizer_config.json"
    if config.is_file():
        values = read_json(config)
        for key in numbers:
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str) and value in pieces:
                tokens[key] = value
        if isinstance(values.get("chat_template"), str):
            tokens["chat_template"] = values["chat_template"]
    template = folder / "chat_template.jinja"
    if template.is_file():
        tokens["chat_template"] = template.read_text(encoding="utf-8")
    return tokens


def parse_sentencepiece(path: Path) -> Any:
    """The protobuf message; None if the file has another format, such as tiktoken ranks.

    Raises:
        DataError: it is damaged.
        UsageError: the package that reads it is not installed.
    """
    raw = path.read_bytes()
    if not raw.startswith(b"\n"):  # field 1, the pieces, comes first in every sentencepiece model
        return None
    with optional_package(f"{path}: reading a sentencepiece model", "sentencepiece"):
        messages = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(raw)
    except Exception as error:  # protobuf's DecodeError, without importing protobuf for its name
        raise DataError(
            f"{path}: not a valid sentencepiece model: {error}. It may be truncated; download it again."
        ) from error
    return proto if len(proto.pieces) else None
