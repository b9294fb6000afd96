"""Samples to micro batches: the sequences of each step, packed and split over ranks.

Each epoch is a new permutation of the sequences, drawn from the seed and the epoch number; the sets of a ``mixture``
are packed separately and have their own epochs. Step k takes the next ``global_batch_size`` sequences for any number of
ranks and any micro batch size, so a run resumes at any step in any layout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from isthmus.data.batching.bins import Bins, SingleItems, balance, check_fit
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.shared_prefixes import SharedPrefixes, find_shared_prefixes
from isthmus.data.store.answer_views import MismatchedSamples, neighbors
from isthmus.data.store.mixture import MixtureSet, SequenceOrder
from isthmus.data.store.sample_store import Answers, Samples
from isthmus.data.tokenize.record_kinds import PREFERENCE
from isthmus.errors import DataError, UsageError

Item = TypeVar("Item")
_COMPUTED_ORDER = "-order2"


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentEnds:
    """What an end-of-document token in a sample does, as in Megatron-LM."""

    eod: int
    """The token."""
    reset_attention_mask: bool
    reset_position_ids: bool
    eod_mask_loss: bool

    def apply(self, tokens: npt.NDArray[Any], loss_mask: npt.NDArray[Any], positions: npt.NDArray[Any]) -> list[int]:
        """Change mask and positions of a sample, [n] like its inputs ``tokens``; returns the lengths to attend in."""
        ends = np.flatnonzero(tokens == self.eod)
        if self.eod_mask_loss:
            loss_mask[ends] = False
        starts = np.append(0, ends[ends < len(tokens) - 1] + 1)
        lengths = np.diff(np.append(starts, len(tokens)))
        if self.reset_position_ids:
            positions -= np.repeat(starts, lengths)
        return lengths.tolist() if self.reset_attention_mask else [len(tokens)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The same on every rank."""

    seq_length: int
    """Maximum number of tokens of a sequence."""
    micro_batch_size: int
    global_batch_size: int
    packing: bool
    """Whether a sequence contains several samples."""
    seed: int = 0
    shuffle: bool = True
    """False takes samples in the order of the store."""
    length_buckets: Sequence[int] = ()
    """Lengths to pad micro batches to, ascending and multiples of ``BatchShard.pad_to_multiple_of``. The sequences of a
    step are then sorted by length, so that the ranks have micro batches of similar lengths at the same time.
    """
    documents: DocumentEnds | None = None
    """None: a sample is one document, or a part of it."""
    share_prefixes: bool = False
    """Whether samples of a micro batch that begin with the same tokens share the computation of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShard:
    """One data-parallel rank's part of each step."""

    dp_rank: int = 0
    dp_size: int = 1
    pad_to_multiple_of: int = 1
    micro_batches_multiple_of: int = 1
    equal_lengths: bool = False
    """Pad the micro batches of a step to the longest one, so that pipeline stages exchange no shapes."""


class Batches:
    _computes_order = True
    """Whether the order of a large set may be computed."""

    def __init__(
        self,
        store: Samples,
        settings: BatchSettings,
        shard: BatchShard | None = None,
        *,
        shares: Sequence[MixtureSet] = (),
    ) -> None:
        """Group the samples into sequences: single samples, or with ``packing`` bins of at most ``seq_length`` tokens.

        ``shares`` are the sets of the store, mixed by weight; without any, the store is one set. Raises UsageError for
        sizes that do not fit the ranks, and DataError for an empty set or too long samples.
        """
        self.store = store
        self.settings = settings
        self.shard: BatchShard = shard or BatchShard()
        _check_sizes(settings, self.shard.dp_size)
        self.shares: tuple[MixtureSet, ...] = tuple(shares) or (MixtureSet("data", len(store), 1.0),)
        if not all(share.samples for share in self.shares) or sum(share.samples for share in self.shares) != len(store):
            raise DataError("there are no samples to make batches of, or a set has none.")
        self._inputs = _targets(store.lengths)
        if int(self._inputs.min()) < 1:
            raise DataError(f"sample {int(self._inputs.argmin())} has fewer than 2 tokens, so it has no label.")
        check_fit(self._inputs, settings.seq_length)
        ends = np.cumsum([share.samples for share in self.shares]).tolist()
        self._sets = [self._sequences(end - share.samples, end) for share, end in zip(self.shares, ends, strict=True)]
        counts = [len(sequences) for sequences in self._sets]
        self._ends = np.cumsum(counts).tolist()
        self._counts = counts
        self._order = self._sequence_order(computed=self._computes_order)

    def _sequence_order(self, *, computed: bool) -> SequenceOrder:
        weights = [share.weight for share in self.shares]
        settings = self.settings
        return SequenceOrder(self._counts, weights, seed=settings.seed, shuffle=settings.shuffle, computed=computed)

    @property
    def order_version(self) -> str:
        """A suffix of the fingerprint of the data if the order of a set is computed; empty for orders in memory."""
        return _COMPUTED_ORDER if any(self._order.computed) else ""

    def use_order_of(self, fingerprint: str) -> None:
        """Use the order of a checkpoint with this fingerprint of its data."""
        if not fingerprint.endswith(_COMPUTED_ORDER):
            self._order = self._sequence_order(computed=False)

    def role(self, batch: PackedBatch, sample: int) -> str:
        """Role of a sample of a micro batch, such as ``chosen``; empty if all have the same."""
        return ""

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.settings.global_batch_size

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of all sets."""
        return int(self._ends[-1])

    @property
    def steps_per_epoch(self) -> int:
        """The last step may reach into the next epoch."""
        return -(-self.sequences_per_epoch // self.global_batch_size)

    @property
    def num_microbatches(self) -> int:
        """Micro batches of one rank in one step."""
        return self.global_batch_size // (self.settings.micro_batch_size * self.shard.dp_size)

    @property
    def tokens_per_step(self) -> float:
        """Mean over an epoch, without padding."""
        return float(self._inputs.sum(dtype=np.int64)) / self.sequences_per_epoch * self.global_batch_size

    def step(self, step_index: int) -> list[PackedBatch]:
        """This rank's micro batches of step ``step_index``, counted from 0."""
        first = step_index * self.global_batch_size
        return self._distribute([self._samples(self._order.at(first + k)) for k in range(self.global_batch_size)])

    def epochs(self, steps: int) -> dict[str, float]:
        """Epochs of each set in ``steps`` steps, by its name."""
        times = self._order.epochs(steps * self.global_batch_size)
        return {share.name: time for share, time in zip(self.shares, times, strict=True)}

    def eval_batches(self) -> Iterator[list[PackedBatch]]:
        """All samples in store order; at the end, micro batches of padding give every rank the same number."""
        count = self.sequences_per_epoch
        for first in range(0, count, self.global_batch_size):
            yield self._distribute([self._samples(k) for k in range(first, min(first + self.global_batch_size, count))])

    def _sequences(self, first: int, end: int) -> Bins | SingleItems | list[list[int]]:
        is_full = self._inputs.strides == (0,) and int(self._inputs[0]) == self.settings.seq_length
        if is_full or not self.settings.packing:
            return SingleItems(first, end)
        return Bins.packed(self._inputs[first:end], self.settings.seq_length, first)

    def _samples(self, number: int) -> list[int]:
        chosen = bisect_right(self._ends, number)
        return self._sets[chosen][number - (self._ends[chosen - 1] if chosen else 0)]

    def _rounds(self, num_sequences: int) -> int:
        multiple = self.shard.micro_batches_multiple_of
        return -(-num_sequences // (self.settings.micro_batch_size * self.shard.dp_size * multiple)) * multiple

    def _distribute(self, sequences: list[list[int]]) -> list[PackedBatch]:
        """This rank's micro batches: rank 0 gets the first sequences, rank 1 the next, ...

        With buckets the longest sequences come first and every other round reverses the ranks, which balances their
        work.
        """
        size, ranks, rank = self.settings.micro_batch_size, self.shard.dp_size, self.shard.dp_rank
        rounds = self._rounds(len(sequences))
        ranks_of_rounds = [rank] * rounds
        if self.settings.length_buckets:
            sequences = sorted(sequences, key=lambda samples: -int(self._inputs[samples].sum()))
            ranks_of_rounds[1::2] = [ranks - 1 - rank] * (rounds // 2)
        starts = [(k * ranks + place) * size for k, place in enumerate(ranks_of_rounds)]
        return self._pack_all([[s for sequence in sequences[at : at + size] for s in sequence] for at in starts])

    def _pack_all(self, micro_batches: list[list[int]]) -> list[PackedBatch]:
        totals = [self._padded_length(int(self._inputs[samples].sum())) for samples in micro_batches]
        longest = max(totals)
        pad_to = [longest if self.shard.equal_lengths else total for total in totals]
        return [self._pack(samples, total) for samples, total in zip(micro_batches, pad_to, strict=True)]

    def _padded_length(self, tokens: int) -> int:
        """A micro batch of padding alone has at least two tokens."""
        tokens, buckets = tokens or 2, self.settings.length_buckets
        if not buckets:
            return -(-tokens // self.shard.pad_to_multiple_of) * self.shard.pad_to_multiple_of
        if tokens > buckets[-1]:
            raise UsageError(
                f"a micro batch has {tokens} tokens, data.length_buckets ends at {buckets[-1]}. Add a larger bucket."
            )
        return buckets[bisect_left(buckets, tokens)]

    def _pack(self, samples: list[int], total: int) -> PackedBatch:
        """Concatenate samples to ``total`` tokens; padding is one more sample, without loss."""
        inputs = self._inputs[samples].tolist()
        real = sum(inputs)
        input_ids, labels, position_ids = np.zeros((3, total), dtype=np.int64)
        loss_mask = np.zeros(total, dtype=np.bool_)
        documents = self.settings.documents
        lengths: list[int] = []
        sample_ids: list[int] = []
        parts: list[npt.NDArray[Any]] = []
        start = 0
        for sample, length in zip(samples, inputs, strict=True):
            tokens, mask = self.store[sample]
            span = slice(start, start + length)
            input_ids[span] = tokens[:-1]
            loss_mask[span] = mask[1:]
            position_ids[span] = np.arange(length)
            ends = [length]
            if documents is not None:
                ends = documents.apply(tokens[:-1], loss_mask[span], position_ids[span])
            labels[span] = tokens[1:] * loss_mask[span]
            lengths += ends
            sample_ids += [sample] * len(ends)
            parts.append(input_ids[span])
            start += length
        if total > real:
            position_ids[real:] = np.arange(total - real) % self.settings.seq_length  # valid positions of the model
            lengths.append(total - real)
        loss_tokens = np.add.reduceat(loss_mask, np.cumsum([0, *lengths[:-1]]), dtype=np.int64).tolist()
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            lengths=tuple(lengths),
            padding=total - real,
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            loss_tokens=tuple(loss_tokens),
            sample_ids=tuple(sample_ids),
            shared=self._shared_prefixes(samples, parts, total) if self.settings.share_prefixes else None,
        )

    def _shared_prefixes(self, samples: list[int], inputs: list[npt.NDArray[Any]], total: int) -> SharedPrefixes | None:
        """The tokens that samples with these ``inputs`` have in common."""
        return find_shared_prefixes(inputs, total, self.shard.pad_to_multiple_of)


class AnswerBatches(Batches):
    """The micro batches of one data-parallel rank; a sequence is one answer with its prompt.

    With ``packing`` all micro batches of a step, over all ranks, have about the same length; else each has
    ``micro_batch_size`` sequences.
    """

    store: Answers
    reference: torch.Tensor | None = None
    """float64 [samples of the store], log-probabilities under the reference model."""

    def role(self, batch: PackedBatch, sample: int) -> str:
        return "desirable" if batch.values[sample] else "undesirable"

    def _sequences(self, first: int, end: int) -> Bins | SingleItems | list[list[int]]:
        return SingleItems(first, end)

    def _distribute(self, sequences: list[list[int]]) -> list[PackedBatch]:
        if not self.settings.packing:
            return super()._distribute(sequences)
        sizes = [int(self._inputs[samples].sum()) for samples in sequences]
        micro_batches = balance(sizes, self._rounds(len(sequences)) * self.shard.dp_size)
        local_micro_batches = micro_batches[self.shard.dp_rank :: self.shard.dp_size]
        return self._pack_all([[sample for k in chosen for sample in sequences[k]] for chosen in local_micro_batches])

    def _pack(self, samples: list[int], total: int) -> PackedBatch:
        batch = super()._pack(samples, total)
        if self.reference is not None:
            batch = replace(batch, reference_logps=self.reference[samples])
        return replace(batch, values=tuple(self.store.values[samples].tolist()))


class UnpairedBatches(AnswerBatches):
    """Answers with labels; the samples of ``mismatched`` have the prompts of these and other answers."""

    _computes_order = False  # the answers before and after each are read from the whole order

    def __init__(
        self,
        store: Answers,
        settings: BatchSettings,
        shard: BatchShard | None = None,
        *,
        shares: Sequence[MixtureSet] = (),
    ) -> None:
        super().__init__(store, settings, shard, shares=shares)
        starts = np.cumsum([0, *self._order.counts]).tolist()
        orders = [self._order.permutation(k, epoch=0) + start for k, start in enumerate(starts[:-1])]
        others = neighbors(orders, store.groups, settings.global_batch_size)
        mismatched = MismatchedSamples(store, others, most=settings.seq_length + 1)
        self.mismatched: AnswerBatches = AnswerBatches(mismatched, settings, shard, shares=shares)

    def _pack_all(self, micro_batches: list[list[int]]) -> list[PackedBatch]:
        pairs = zip(super()._pack_all(micro_batches), self.mismatched._pack_all(micro_batches), strict=True)
        return [replace(batch, mismatched=mismatched) for batch, mismatched in pairs]


class PairBatches(AnswerBatches):
    """Samples 2k and 2k + 1 of store and micro batch are a pair, and a sequence is a pair."""

    def role(self, batch: PackedBatch, sample: int) -> str:
        return PREFERENCE.roles[sample % 2]

    def _sequences(self, first: int, end: int) -> list[list[int]]:
        groups = self.store.groups[first:end]
        if len(groups) % 2 or bool(np.any(groups[::2] != groups[1::2])):
            raise DataError("the samples are not pairs of answers, one after the other. Prepare them as preferences.")
        return [[chosen, chosen + 1] for chosen in range(first, end, 2)]


def _targets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Labels of samples with so many tokens; of equal lengths that are a view of one number, such a view."""
    if lengths.strides == (0,) and len(lengths):
        return np.broadcast_to(np.maximum(lengths[0] - 1, 0), lengths.shape)
    return np.maximum(lengths - 1, 0)


def _check_sizes(settings: BatchSettings, dp_size: int) -> None:
    for name in ("micro_batch_size", "seq_length"):
        if getattr(settings, name) < 1:
            raise UsageError(f"{name}={getattr(settings, name)}, expected 1 or more.")
    check_batch_sizes(settings.global_batch_size, settings.micro_batch_size, dp_size)


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, dp_size: int) -> None:
    """Check that all data-parallel ranks have the same number of whole micro batches."""
    size, at_once = global_batch_size, micro_batch_size * dp_size
    if size < 1 or size % at_once:
        below = size // at_once * at_once
        hint = f"{below} or {below + at_once}" if below else f"{at_once}"
        raise UsageError(
            f"train.global_batch_size={size} is not a multiple of micro_batch_size={micro_batch_size} x "
            f"data-parallel ranks={dp_size}. Use {hint}."
        )


def prefetched(make: Callable[[int], Item], steps: range) -> Generator[Item, None, None]:
    """Yield ``make(step)`` for each step; a thread computes the next one.

    An error of ``make`` is raised where its result is used. Closing the generator waits for the current call.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-batch") as thread:
        following = None
        for step in steps:
            item = (thread.submit(make, step) if following is None else following).result()
            following = thread.submit(make, step + steps.step) if step != steps[-1] else None
            yield item
