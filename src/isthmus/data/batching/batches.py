"""Samples to micro batches: which sequences a step takes, and how they are laid end to end.

The order of sequences is one endless line, a new permutation each epoch, drawn from the seed and the epoch alone; sets
that are mixed (``mixture``) are packed each for itself and have epochs of their own. Step k takes the
next ``global_batch_size`` of the line, whatever the number of ranks and the micro-batching; so a run goes on from any
step without state, under any layout. Which of them lie on one line of tokens, and on which rank, is settled within a
step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isthmus.data.batching.packing import Bins, check_fit
from isthmus.data.store.mixture import MixtureSet, SequenceOrder
from isthmus.data.store.samples import Samples
from isthmus.errors import DataError, UsageError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole samples end to end on one line of T tokens ("thd"), as CPU tensors."""

    input_ids: torch.Tensor
    """int64 [T]"""
    labels: torch.Tensor
    """int64 [T], already shifted; 0 where nothing is learned."""
    loss_mask: torch.Tensor
    """bool [T], True where the label is learned."""
    position_ids: torch.Tensor
    """int64 [T], from 0 in each sample."""
    cu_seqlens: torch.Tensor
    """int32 [segments + 1], where each segment begins; a segment of padding comes last if there is one."""
    num_tokens: int
    """Tokens of samples, padding not counted."""
    num_samples: int

    @property
    def num_learned(self) -> int:
        """Labels that count in the loss."""
        return int(self.loss_mask.sum())

    @property
    def max_seqlen(self) -> int:
        """Length of the longest segment."""
        return int(torch.diff(self.cu_seqlens).max())


class Batches:
    """The micro batches of one data-parallel rank."""

    def __init__(
        self,
        store: Samples,
        *,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        packing: bool,
        seed: int = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
        pad_to_multiple_of: int = 1,
        micro_batches_multiple_of: int = 1,
        shuffle: bool = True,
        length_buckets: Sequence[int] = (),
        shares: Sequence[MixtureSet] = (),
    ) -> None:
        """Lay out the sequences: one sample each, or with ``packing`` bins of at most ``seq_length`` tokens.

        Args:
            store: the samples.
            seq_length: most tokens of a sequence.
            micro_batch_size: sequences on a line.
            global_batch_size: sequences of a step, over all ranks.
            packing: whether a sequence takes several samples.
            seed: of the order.
            dp_rank: of this rank.
            dp_size: ranks that a step is dealt to.
            pad_to_multiple_of: what the length of a line is a multiple of.
            micro_batches_multiple_of: what the number of lines of a rank is a multiple of.
            shuffle: False takes samples in the order of the store, epoch by epoch.
            length_buckets: lengths of lines, ascending and multiples of ``pad_to_multiple_of``. A line is padded to the
                next of them, and a step has its sequences sorted by length, so that those on a line and those that
                ranks have at the same time are of like length.
            shares: the sets that the store is made of, which are mixed by weight; none: it is one set.

        Raises:
            UsageError: ``global_batch_size`` is no multiple of ``micro_batch_size * dp_size``.
            DataError: the store or a set is empty, or holds a sample longer than ``seq_length`` + 1.
        """
        for name, value in (("micro_batch_size", micro_batch_size), ("seq_length", seq_length)):
            if value < 1:
                raise UsageError(f"{name}={value}. Wanted 1 or more.")
        at_once = micro_batch_size * dp_size
        if global_batch_size < 1 or global_batch_size % at_once:
            below = global_batch_size // at_once * at_once
            mend = f"{below} or {below + at_once}" if below else f"{at_once}"
            raise UsageError(
                f"train.global_batch_size={global_batch_size} is not a multiple of "
                f"micro_batch_size={micro_batch_size} x data-parallel ranks={dp_size}. Use {mend}."
            )
        self.shares = tuple(shares) or (MixtureSet("data", len(store), 1.0),)
        if not all(share.samples for share in self.shares) or sum(share.samples for share in self.shares) != len(store):
            raise DataError("there are no samples to make batches of, or a set has none.")
        self.store = store
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size, self.pad_to_multiple_of = dp_rank, dp_size, pad_to_multiple_of
        self.micro_batches_multiple_of = micro_batches_multiple_of
        self.seq_length, self.length_buckets = seq_length, tuple(length_buckets)
        inputs = np.maximum(store.lengths - 1, 0)
        if int(inputs.min()) < 1:
            raise DataError(f"sample {int(inputs.argmin())} has fewer than 2 tokens, so it holds no label.")
        check_fit(inputs, seq_length)
        self._inputs = inputs
        ends = np.cumsum([share.samples for share in self.shares]).tolist()
        self._sets = [
            self._set(end - share.samples, end, packing) for share, end in zip(self.shares, ends, strict=True)
        ]
        counts = [len(sequences) for sequences in self._sets]
        self._ends = np.cumsum(counts).tolist()
        self._order = SequenceOrder(counts, [share.weight for share in self.shares], seed=seed, shuffle=shuffle)

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences (samples, or bins of packed samples) of all sets; an epoch of a mix has as many, of whichever."""
        return int(self._ends[-1])

    @property
    def steps_per_epoch(self) -> int:
        """Steps until as many sequences as there are have been seen; the last of them reaches into the next epoch."""
        return -(-self.sequences_per_epoch // self.global_batch_size)

    @property
    def num_microbatches(self) -> int:
        """Micro batches of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def step(self, step_index: int) -> list[MicroBatch]:
        """This rank's micro batches of step ``step_index``, counted from 0."""
        first = step_index * self.global_batch_size
        chosen = [self._sequence(self._order.at(first + k)) for k in range(self.global_batch_size)]
        return self._deal(chosen)

    def epochs(self, steps: int) -> dict[str, float]:
        """How many times each set is gone through in so many steps, by name."""
        times = self._order.epochs(steps * self.global_batch_size)
        return {share.name: time for share, time in zip(self.shares, times, strict=True)}

    def eval_batches(self) -> Iterator[list[MicroBatch]]:
        """One pass in the store's own order, nothing twice, nothing left out.

        Every rank gets as many micro batches as the others, with micro batches of padding where sequences run out.
        """
        count = self.sequences_per_epoch
        for first in range(0, count, self.global_batch_size):
            yield self._deal([self._sequence(k) for k in range(first, min(first + self.global_batch_size, count))])

    def _set(self, first: int, end: int, packing: bool) -> Bins | list[list[int]]:
        """The sequences of one set, which is the samples from ``first`` to ``end``."""
        if not packing:
            return Bins.single(first, end)
        return Bins.packed(self._inputs[first:end], self.seq_length, first)

    def _sequence(self, number: int) -> list[int]:
        """The samples of a sequence; those of all sets are numbered through."""
        chosen = bisect_right(self._ends, number)
        return self._sets[chosen][number - (self._ends[chosen - 1] if chosen else 0)]

    def _deal(self, sequences: list[list[int]]) -> list[MicroBatch]:
        """Deal a global batch out: first micro batch of rank 0, of rank 1, ..., second of rank 0, ...

        With buckets the longest come first, and every other round goes backwards over the ranks: in each round their
        work is about the same, and no rank has the longer ones of all rounds.
        """
        size, ranks = self.micro_batch_size, self.dp_size
        multiple = self.micro_batches_multiple_of
        rounds = -(-len(sequences) // (size * ranks * multiple)) * multiple
        places = [self.dp_rank] * rounds
        if self.length_buckets:
            sequences = sorted(sequences, key=lambda samples: -int(self._inputs[samples].sum()))
            places[1::2] = [ranks - 1 - self.dp_rank] * (rounds // 2)
        starts = [(k * ranks + place) * size for k, place in enumerate(places)]
        return [self._join([s for sequence in sequences[at : at + size] for s in sequence]) for at in starts]

    def _line_length(self, tokens: int) -> int:
        """Of a line of this many tokens, with its padding, of which there are at least two where there is no more."""
        tokens, buckets = tokens or 2, self.length_buckets
        if buckets:
            if tokens > buckets[-1]:
                raise UsageError(
                    f"a line has {tokens} tokens, data.length_buckets ends at {buckets[-1]}. Add a larger one."
                )
            return buckets[bisect_left(buckets, tokens)]
        return -(-tokens // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _join(self, samples: list[int]) -> MicroBatch:
        """Lay samples end to end and pad the line, with a segment of its own that nobody learns from."""
        lengths = self._inputs[samples].tolist()
        real = sum(lengths)
        total = self._line_length(real)
        input_ids = np.zeros(total, dtype=np.int64)
        labels = np.zeros(total, dtype=np.int64)
        loss_mask = np.zeros(total, dtype=np.bool_)
        position_ids = np.zeros(total, dtype=np.int64)
        bounds, at = [0], 0
        for sample, length in zip(samples, lengths, strict=True):
            tokens, mask = self.store[sample]
            end = at + length
            input_ids[at:end] = tokens[:-1]
            loss_mask[at:end] = mask[1:]
            labels[at:end] = tokens[1:] * mask[1:]
            position_ids[at:end] = np.arange(length)
            bounds.append(end)
            at = end
        if total > real:
            position_ids[real:] = np.arange(total - real) % self.seq_length  # a model may have learned no further ones
            bounds.append(total)
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=torch.from_numpy(position_ids),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            num_tokens=real,
            num_samples=len(samples),
        )
