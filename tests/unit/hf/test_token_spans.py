"""The quick way to a mask gives the mask of the slow one."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isthmus.data.spans import token_mask
from isthmus.hf.tiny import train_tokenizer
from isthmus.hf.tokenizer import Tokenizer

LETTERS = ["a", "b", " ", "\n", "✓", "é", "e\u0301", "🌊", "the sea", "<|im_end|>"]


def words_without_blanks() -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "é": 2, "?": 3}, unk_token="?"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="?"))


@pytest.mark.parametrize("kind", ["bytes", "words", "sentencepiece"])
def test_masks_are_those_of_all_offsets(kind, request):
    if kind == "sentencepiece":
        from isthmus.hf.tokenizer import load_tokenizer

        pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
        tokenizer = load_tokenizer(request.getfixturevalue("shared_data") / "llama2-tokenizer")
    else:
        trained = train_tokenizer(["the sea is wide ✓ é"] * 3, vocab_size=290)
        tokenizer = Tokenizer(trained) if kind == "bytes" else words_without_blanks()
    dice = random.Random(0)
    texts, spans = [], []
    for _ in range(200):
        text = "".join(dice.choices(LETTERS, k=dice.randint(1, 12)))
        edges = sorted(dice.sample(range(len(text) + 1), k=min(len(text) + 1, 2 * dice.randint(1, 2)) // 2 * 2))
        texts.append(text)
        spans.append(list(zip(edges[::2], edges[1::2], strict=True)))
    quick = tokenizer.encode_with_mask(texts, spans)
    for (ids, mask), (all_ids, offsets), learned in zip(
        quick, tokenizer.encode_with_offsets(texts), spans, strict=True
    ):
        assert ids.tolist() == all_ids
        assert mask.tolist() == token_mask(offsets, learned).tolist()
