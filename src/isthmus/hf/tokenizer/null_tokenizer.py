"""Megatron-LM's NullTokenizer: the text is a list of token ids, separated by spaces."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isthmus.errors import DataError
from isthmus.hf.tokenizer.tokenizer import Span, Tokenizer

END = "<eod>"
"""The end-of-document token; its id is ``vocab_size``."""


class NumberTokenizer(Tokenizer):
    """A fast tokenizer of numbers below ``vocab_size``, saved as a class of transformers."""

    def __init__(self, vocab_size: int) -> None:
        backend = Backend(models.WordLevel({str(number): number for number in range(vocab_size)} | {END: vocab_size}))
        backend.normalizer = normalizers.Replace(Regex("(?<![0-9])0+(?=[0-9])"), "")  # 007 is 7
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        build: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
        super().__init__(build(tokenizer_object=backend, eos_token=END), differs_from_files=True)
        self.numbers = vocab_size

    def encode(self, text: str) -> list[int]:
        self._check([text])
        return super().encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self._check(texts)
        return super().encode_batch(texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        self._check(texts)
        return super().encode_with_offsets(texts)

    def _check(self, texts: Sequence[str]) -> None:
        for text in texts:
            for word in text.replace(END, " ").split():
                if not re.fullmatch("[0-9]{1,18}", word) or int(word) >= self.numbers:
                    raise DataError(
                        f"{word[:40]!r} is not a number below {self.numbers}. NullTokenizer reads numbers "
                        "separated by spaces; for other text set tokenizer.path."
                    )
