"""Views of answers: with the prompts of others, for the KL divergence of KTO; or to be scored by a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.data.store.sample_store import Answers, Float32, Int64, UInt8


def neighbors(orders: Sequence[Int64], groups: Int64, batch_size: int) -> Int64:
    """The sample before each one, [samples], as in TRL: cyclic in each batch of ``batch_size`` samples.

    ``orders`` has the samples of each set in the order of training; together they contain every sample once. If the
    sample before is of the same group (the other answer to the prompt), it is the second before.
    """
    result = np.empty(len(groups), dtype=np.int64)
    for order in orders:
        numbers = np.arange(len(order), dtype=np.int64)
        first = numbers - numbers % batch_size
        sizes = np.minimum(batch_size, len(order) - first)
        before, second = (order[first + (numbers - first - shift) % sizes] for shift in (1, 2))
        before = np.where(sizes == 1, np.roll(order, 1), before)  # a batch of one has the answer before it
        result[order] = np.where(groups[before] == groups[order], second, before)
    return result


class MismatchedSamples:
    """Sample k is the prompt of sample k of ``store`` and the answer of sample ``others[k]``, cut to ``most`` tokens.

    An answer begins with the first loss token. Creating the view reads the masks of all samples.
    """

    def __init__(self, store: Answers, others: Int64, *, most: int) -> None:
        self._store, self._others, self._most = store, others, most
        count = len(store)
        self._prompts = np.fromiter((int(store[k][1][1:].argmax()) + 1 for k in range(count)), np.int64, count)
        answers = store.lengths - self._prompts
        self.lengths: Int64 = np.minimum(self._prompts + answers[others], most)
        """[n]"""
        self.groups: Int64 = store.groups
        self.values: Float32 = store.values

    def __len__(self) -> int:
        return len(self._others)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int32], UInt8]:
        """(tokens, mask) of a sample."""
        other = int(self._others[index])
        prompt, begin = slice(0, int(self._prompts[index])), int(self._prompts[other])
        (tokens, mask), (answer, answer_mask) = self._store[index], self._store[other]
        joined = np.concatenate([tokens[prompt], answer[begin:]]), np.concatenate([mask[prompt], answer_mask[begin:]])
        return joined[0][: self._most], joined[1][: self._most]

    def digest(self) -> str:
        pairing = xxhash.xxh3_128(np.ascontiguousarray(self._others).data)
        return f"mismatched {self._most} {pairing.hexdigest()} {self._store.digest()}"


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How transformers reads the end of a text that it scores."""

    padding: int | None = None
    """The token that it skips at the end."""
    after: tuple[int, ...] = ()
    """Tokens of the chat template after an answer."""


class ScoredSamples:
    """The samples of ``store`` as texts to score: with the tokens after an answer, up to ``most`` tokens.

    One more token at the end makes all of them inputs. The mask selects the input whose hidden state is scored: as in
    transformers, the last that is not padding.
    """

    def __init__(self, store: Answers, end: AnswerEnd, *, most: int) -> None:
        self.store = store
        self._end = end
        self.lengths: Int64 = np.minimum(store.lengths + len(end.after), most) + 1
        """[n]"""
        self.groups: Int64 = store.groups
        self.values: Float32 = store.values

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int32], UInt8]:
        """(tokens, mask) of a sample."""
        length = int(self.lengths[index])
        tokens = np.append(self.store[index][0], self._end.after).astype(np.int32)[: length - 1]
        unpadded = np.flatnonzero(tokens != (-1 if self._end.padding is None else self._end.padding))
        mask = np.zeros(length, dtype=np.uint8)
        mask[1 + (int(unpadded[-1]) if len(unpadded) else 0)] = 1
        return np.append(tokens, tokens[:1]), mask

    def digest(self) -> str:
        return f"scored {self._end} {self.store.digest()}"
