"""Opens tokenizers by Megatron-LM's ``--tokenizer-type``, and checks that the files are of that type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import GPT2Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tokenizer.sentencepiece_model import read_sentencepiece
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer

_KINDS = ("HuggingFaceTokenizer", "Llama2Tokenizer", "DeepSeekV2Tokenizer", "GPT2BPETokenizer")
"""Types that are read from files."""
_SENTENCEPIECE = "tokenizer.model"
_NULL_END = "<eod>"
_MARKS: Mapping[str, tuple[str, ...]] = {
    "DeepSeekV2Tokenizer": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "GPT2BPETokenizer": ("<|endoftext|>",),
}
"""Tokens that every tokenizer of a type has."""


def open_tokenizer(path: Path, kind: str | None = None, *, trust_remote_code: bool = False) -> Tokenizer:
    """Read a tokenizer, a folder or a sentencepiece file, and check its type; ``kind`` None accepts any."""
    if kind is not None and kind not in _KINDS:
        raise UsageError(
            f"a tokenizer of type {kind} is not read from files. Use {', '.join(_KINDS)}, or leave it out."
        )
    if kind == "Llama2Tokenizer" or path.is_file():
        return _sentencepiece(path, kind)
    if kind == "GPT2BPETokenizer" and not (path / "tokenizer.json").is_file():
        tokenizer = _from_merges(path)
    else:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    lacking = [mark for mark in _MARKS.get(kind or "", ()) if mark not in tokenizer.inner.get_vocab()]
    if lacking:
        raise UsageError(
            f"tokenizer.type={kind}: {path} has no token {lacking[0]}, so it is of another type. "
            "Leave the type out, or give another tokenizer."
        )
    return tokenizer


def _sentencepiece(path: Path, kind: str | None) -> Tokenizer:
    file = path / _SENTENCEPIECE if path.is_dir() else path
    if kind not in (None, "Llama2Tokenizer"):
        raise UsageError(
            f"tokenizer.type={kind} is read from a folder, and {path} is a file. Give its folder, or leave the type "
            "out if it is a sentencepiece model."
        )
    if not file.is_file():
        hint = "Leave the type out: any tokenizer of a folder is read." if path.is_dir() else "Check the path."
        raise MissingInput(f"{file} does not exist; a Llama2Tokenizer is read from a sentencepiece model. {hint}")
    inner = read_sentencepiece(file)
    if inner is None:
        raise DataError(
            f"{file} is not a sentencepiece BPE model like that of Llama 2. Give the model folder, "
            "without tokenizer.type."
        )
    return Tokenizer(inner, file.parent, differs_from_files=True)


def _from_merges(path: Path) -> Tokenizer:
    files = [path / name if (path / name).is_file() else _only(path, name) for name in ("vocab.json", "merges.txt")]
    build: Callable[..., GPT2Tokenizer] = GPT2Tokenizer
    try:
        return Tokenizer(build(*map(str, files)), path, differs_from_files=True)
    except UsageError:
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise DataError(f"{path}: vocab.json and merges.txt cannot be read: {' '.join(str(error).split())}") from error


def _only(path: Path, name: str) -> Path:
    """The only file whose name ends in ``name``, such as gpt2-vocab.json."""
    match sorted(path.glob(f"*{name}")):
        case [file]:
            return file
        case []:
            raise MissingInput(
                f"{path / name} does not exist. A GPT2BPETokenizer needs vocab.json and merges.txt, or tokenizer.json."
            )
        case [first, second, *_]:
            raise UsageError(f"{path} has {first.name} and {second.name}. Keep one of them, or name it {name}.")
    raise AssertionError


class NumberTokenizer(Tokenizer):
    """Megatron-LM's NullTokenizer: the text is a list of numbers below ``vocab_size``, which is the id of ``<eod>``."""

    def __init__(self, vocab_size: int) -> None:
        backend = Backend(
            models.WordLevel({str(number): number for number in range(vocab_size)} | {_NULL_END: vocab_size})
        )
        backend.normalizer = normalizers.Replace(Regex("(?<![0-9])0+(?=[0-9])"), "")  # 007 is 7
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        build: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
        super().__init__(build(tokenizer_object=backend, eos_token=_NULL_END), differs_from_files=True)
        self.numbers = vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            for word in text.replace(_NULL_END, " ").split():
                if not re.fullmatch("[0-9]{1,18}", word) or int(word) >= self.numbers:
                    raise DataError(
                        f"{word[:40]!r} is not a number below {self.numbers}. NullTokenizer reads numbers "
                        "separated by spaces; for other text set tokenizer.path."
                    )
        return super().encode_batch(texts)
