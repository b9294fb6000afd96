"""The quick ways to a mask give the mask of the slow one."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from isthmus.data.chat.loss_spans import token_mask
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.byte_lengths import ByteLengths
from isthmus.hf.tokenizer.tokenizer import Tokenizer

TO_MARKS = normalizers.Replace(" ", "▁")
LETTERS = ["a", "  ", "b", " ", "\n", "✓", "é", "e\u0301", "🌊", "the sea", "<|im_end|>", "1234", " <mark> ", "▁"]


def words_without_blanks() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "é": 2, "?": 3}, unk_token="?"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def byte_level(**marks: bool) -> Backend:
    backend: Backend = train_tokenizer(["the sea is wide ✓ é"] * 3, vocab_size=290).backend_tokenizer
    if marks:
        backend.add_tokens([AddedToken("<mark>", **marks)])
    return backend


def composed() -> Backend:
    """As Qwen's: NFC, a pattern that cuts, and bytes."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\p{L}\p{N}]+"), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.Digits(individual_digits=True), as_bytes])
    return backend


def with_a_blank_before() -> Backend:
    backend = byte_level(lstrip=True)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def without_digits() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), behavior="removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def with_few_bytes() -> Backend:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2, "ab": 3}, merges=[("a", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return backend


def sentences(
    normalizer=None, pre_tokenizer=None, first_byte: int = 0, left_out: str = "", falls_back: bool = True, **marks: bool
) -> Backend:
    """As sentencepiece's: blanks are written as marks, and what is not known as bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(first_byte, 256)]
    pieces += ["▁", "a", "b", "t", "h", "e", "é", "▁t", "he", "▁the", "▁a", "▁▁", "ab"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("a", "b")]
    vocab = {piece: number for number, piece in enumerate(pieces) if not (left_out and left_out in piece)}
    merges = [merge for merge in merges if not (left_out and left_out in "".join(merge))]
    unknown = {} if falls_back else {"unk_token": "<0x00>", "fuse_unk": True}
    backend = Backend(models.BPE(vocab, merges, byte_fallback=falls_back, **unknown))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens([AddedToken("<mark>", **marks)])
    return backend


def with_mark(**others) -> Backend:
    return sentences(normalizers.Sequence([normalizers.Prepend("▁"), TO_MARKS]), **others)


def with_added_marks(backend: Backend) -> Backend:
    """As Gemma's: runs of marks, which the model makes of blanks too, are looked for before all else."""
    backend.add_tokens([AddedToken("▁▁", normalized=False)])
    return backend


def nothing_normalized() -> Backend:
    """As DeepSeek's."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([])
    return backend


def only_cut() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Digits()
    return backend


def not_cut() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    return backend


def spaced(scheme: str) -> Backend:
    return sentences(None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


QUICK = {
    "bytes": byte_level,
    "marked": lambda: byte_level(normalized=False, single_word=True),
    "composed": composed,
    "as llama 2": with_mark,
    "as mistral": lambda: spaced("first"),
    "as yi": lambda: spaced("always"),
    "as gemma": lambda: sentences(TO_MARKS, pre_tokenizers.Split(" ", "merged_with_previous")),
    "normalized mark": lambda: with_mark(normalized=True),
    "as gemma, marks added": lambda: with_added_marks(sentences(TO_MARKS)),
    "as deepseek": nothing_normalized,
}
OTHERS = {
    "marks added and put": lambda: with_added_marks(with_mark()),
    "does not fall back": lambda: with_mark(falls_back=False),
    "no mark": lambda: sentences(TO_MARKS, left_out="▁"),
    "only cut": only_cut,
    "not cut": not_cut,
    "few bytes fall back": lambda: with_mark(first_byte=1),
    "blanks taken by a mark": lambda: with_mark(lstrip=True),
    "blanks made one": lambda: sentences(normalizers.Sequence([normalizers.Replace(Regex(" +"), " "), TO_MARKS])),
    "blanks left out": lambda: sentences(TO_MARKS, pre_tokenizers.Split("▁", "removed")),
    "nothing said": sentences,
    "words": words_without_blanks,
    "blank before": with_a_blank_before,
    "blanks taken": lambda: byte_level(rstrip=True),
    "no digits": without_digits,
    "few bytes": with_few_bytes,
}


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))


@pytest.mark.slow_cases("sentencepiece")
@pytest.mark.parametrize("kind", [*QUICK, *OTHERS, "sentencepiece"])
def test_masks_equal_those_from_offsets(kind, request):
    if kind == "sentencepiece":
        from isthmus.hf.tokenizer.tokenizer import load_tokenizer

        pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
        tokenizer = load_tokenizer(request.getfixturevalue("shared_data") / "llama2-tokenizer")
    else:
        tokenizer = wrapped((QUICK | OTHERS)[kind]())
    dice = random.Random(0)
    texts, spans = [""], [[]]
    for _ in range(200):
        text = "".join(dice.choices(LETTERS, k=dice.randint(1, 12)))
        edges = sorted(dice.sample(range(len(text) + 1), k=min(len(text) + 1, 2 * dice.randint(1, 2)) // 2 * 2))
        texts.append(text)
        spans.append(list(zip(edges[::2], edges[1::2], strict=True)))
    quick = tokenizer.encode_with_mask(texts, spans)
    slow = tokenizer.encode_with_offsets(texts)
    for (ids, mask), (all_ids, offsets), learned in zip(quick, slow, spans, strict=True):
        assert ids.tolist() == all_ids
        assert mask.tolist() == token_mask(offsets, learned).tolist()


@pytest.mark.parametrize("kind", ["bytes", "as llama 2", "as mistral", "as yi", "as gemma"])
def test_masks_do_not_look_up_each_character(kind, monkeypatch):
    """Where lengths tell, they are what is used."""
    tokenizer = wrapped(QUICK[kind]())
    text = "<|im_end|>the ✓ sea  ab<|im_end|>ab\n"
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    monkeypatch.setattr("isthmus.hf.tokenizer.tokenizer.tokens_of", None)
    ((_, mask),) = tokenizer.encode_with_mask([text], [[(10, 17), (24, 36)]])
    assert mask.tolist() == token_mask(offsets, [(10, 17), (24, 36)]).tolist()
    assert 0 < mask.sum() < len(ids)


@pytest.mark.parametrize("kind", [*QUICK, *OTHERS])
def test_byte_lengths_only_if_tokens_concatenate_to_the_text(kind):
    assert (ByteLengths.of((QUICK | OTHERS)[kind]()) is not None) == (kind in QUICK)


def test_text_with_changed_bytes_is_detected():
    lengths = ByteLengths.of(composed())
    texts = ["the sea", "cafe\u0301 \u212b", "caf\u00e9"]
    tokenizer = wrapped(composed())
    encoded = [tokenizer.encode(text) for text in texts]
    ids = [number for item in encoded for number in item]
    mask, wrong = lengths.masks(texts, [[(4, 7)], [(0, 2)], [(3, 4)]], ids, list(map(len, encoded)))
    assert wrong == [1]
    assert mask.sum() == len(tokenizer.encode(" sea")) + len(tokenizer.encode("é"))
