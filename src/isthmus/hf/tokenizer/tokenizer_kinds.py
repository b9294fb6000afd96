"""Opens tokenizers by Megatron-LM's ``--tokenizer-type``, and checks that the files are of that type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import GPT2Tokenizer

from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tokenizer.sentencepiece_model import read_sentencepiece
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer

_KINDS = ("HuggingFaceTokenizer", "Llama2Tokenizer", "DeepSeekV2Tokenizer", "GPT2BPETokenizer")
"""Types that are read from files."""
_SENTENCEPIECE = "tokenizer.model"
_MARKS: Mapping[str, tuple[str, ...]] = {
    "DeepSeekV2Tokenizer": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "GPT2BPETokenizer": ("<|endoftext|>",),
}
"""Tokens that every tokenizer of a type has."""


def open_tokenizer(path: Path, kind: str | None = None, *, trust_remote_code: bool = False) -> Tokenizer:
    """Read a tokenizer, a folder or a sentencepiece file, and check its type; ``kind`` None accepts any.

    Raises:
        MissingInput, DataError, UnsafeInput, UsageError: see ``load_tokenizer``; or the tokenizer is of another type.
    """
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
    for name in ("vocab.json", "merges.txt"):
        if not (path / name).is_file():
            raise MissingInput(
                f"{path / name} does not exist. A GPT2BPETokenizer needs vocab.json and merges.txt, or tokenizer.json."
            )
    read: Callable[..., GPT2Tokenizer] = GPT2Tokenizer.from_pretrained
    try:
        return Tokenizer(read(path, local_files_only=True), path, differs_from_files=True)
    except UsageError:
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise DataError(f"{path}: vocab.json and merges.txt cannot be read: {' '.join(str(error).split())}") from error
