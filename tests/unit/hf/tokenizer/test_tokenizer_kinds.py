"""Megatron-LM's tokenizer types and the files they need; the null tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.hf.tokenizer.tokenizer_kinds import NumberTokenizer, open_tokenizer
from unit.hf.tokenizer.gpt2_files import write_gpt2_files

MARKS = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``fast``, one ``deepseek``, and one of ``gpt2`` files: the same words in each."""
    root = tmp_path_factory.mktemp("kinds")
    texts = ["the sea is blue " * 9]
    write_gpt2_files(root / "gpt2", texts)
    write_gpt2_files(root / "prefixed", texts, prefix="gpt2-")
    for name, specials in (("fast", ("<e>",)), ("deepseek", MARKS)):
        (root / name).mkdir()
        last = specials[-1]
        inner = train_tokenizer(texts, vocab_size=300, special_tokens=specials, eos_token=last, pad_token=last)
        save_tokenizer(inner, root / name)
    return root


def test_each_type_opens_its_files(folders: Path, tmp_path: Path) -> None:
    text = "the sea is blue"
    fast = open_tokenizer(folders / "fast", "HuggingFaceTokenizer")
    assert fast.folder == folders / "fast" and "tokenizer.json" in {path.name for path in fast.files}
    deepseek = open_tokenizer(folders / "deepseek", "DeepSeekV2Tokenizer")
    assert deepseek.decode(deepseek.encode(text)) == text and deepseek.encode(MARKS[0]) == [0]
    gpt2 = open_tokenizer(folders / "gpt2", "GPT2BPETokenizer")
    assert gpt2.decode(gpt2.encode(text)) == text and gpt2.inner.convert_ids_to_tokens(gpt2.eos_id) == "<|endoftext|>"
    assert gpt2.files == []  # transformers does not read them by themselves
    assert open_tokenizer(folders / "prefixed", "GPT2BPETokenizer").encode(text) == gpt2.encode(text)
    save_tokenizer(gpt2.inner, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == gpt2.encode(text)


@pytest.mark.parametrize(
    ("kind", "folder", "error", "message"),
    [
        ("DeepSeekV2Tokenizer", "fast", UsageError, "has no token <\uff5cbegin.*so it is of another type"),
        ("GPT2BPETokenizer", "fast", UsageError, r"has no token <\|endoftext\|>"),
        ("GPT2BPETokenizer", ".", MissingInput, r"vocab.json does not exist\. A GPT2BPETokenizer needs"),
        ("Llama2Tokenizer", "fast", MissingInput, r"tokenizer.model does not exist.*Leave the type out"),
        ("Llama2Tokenizer", "gpt2/merges.txt", DataError, "not a sentencepiece BPE model"),
        ("HuggingFaceTokenizer", "gpt2/merges.txt", UsageError, "is read from a folder, and .* is a file"),
    ],
)
def test_other_type_is_refused(folders: Path, kind: str, folder: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_tokenizer(folders / folder, kind)


@pytest.mark.slow
def test_sentencepiece_file(shared_data: Path) -> None:
    tokenizer = open_tokenizer(shared_data / "llama2-tokenizer" / "tokenizer.model", "Llama2Tokenizer")
    text = "The sea, 12 miles off.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.differs_from_files
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32000, 1, 2)


def test_null_tokenizer(tmp_path: Path) -> None:
    tokenizer = NumberTokenizer(100)
    assert (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.bos_id) == (100, 101, None)
    assert tokenizer.encode_batch(["1 2 99", "007\n0"]) == [[1, 2, 99], [7, 0]]
    assert tokenizer.encode_with_offsets(["10 2"]) == [([10, 2], [(0, 2), (3, 4)])]
    assert tokenizer.decode([5, 6]) == "5 6"
    for text in ("1 100", "1 a", "-1", "1.5"):
        with pytest.raises(DataError, match="is not a number below 100"):
            tokenizer.encode_batch([text])
    save_tokenizer(tokenizer.inner, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("1 2 99") == [1, 2, 99]
