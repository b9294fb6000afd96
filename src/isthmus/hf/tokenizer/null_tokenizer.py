"""Numbers for text, as Megatron-LM's NullTokenizer has them: each number between blanks is the token of that number."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isthmus.errors import DataError
from isthmus.hf.tokenizer.tokenizer import Span, Tokenizer

END = "<eod>"
"""Ends a document; its token is the first beyond the numbers."""


class NumberTokenizer(Tokenizer):
    """A fast tokenizer of numbers; saved, it is one of transformers' own, so an export of such a model is complete."""

    def __init__(self, vocab_size: int) -> None:
        """Take the numbers below ``vocab_size`` for tokens."""
        backend = Backend(models.WordLevel({str(number): number for number in range(vocab_size)} | {END: vocab_size}))
        backend.normalizer = normalizers.Replace(Regex("(?<![0-9])0+(?=[0-9])"), "")  # 007 is 7
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        build: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
        super().__init__(build(tokenizer_object=backend, eos_token=END), differs_from_files=True)
        self.numbers = vocab_size

    def encode(self, text: str) -> list[int]:
        """The numbers of one text.

        Raises:
            DataError: it holds something else.
        """
        self._check([text])
        return super().encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of many texts.

        Raises:
            DataError: one of them holds something else.
        """
        self._check(texts)
        return super().encode_batch(texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        """The numbers, and the characters that each of them stands for.

        Raises:
            DataError: one of the texts holds something else.
        """
        self._check(texts)
        return super().encode_with_offsets(texts)

    def _check(self, texts: Sequence[str]) -> None:
        for text in texts:
            for word in text.replace(END, " ").split():
                if not re.fullmatch("[0-9]{1,18}", word) or int(word) >= self.numbers:
                    raise DataError(
                        f"{word[:40]!r} is not a number below {self.numbers}. NullTokenizer takes text of numbers "
                        "between blanks; for other text give tokenizer.path."
                    )
