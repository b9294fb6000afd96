"""Weights as a whole, each on one rank of a pipeline stage, in any layout: for optimizers that need whole matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import Rule
from isthmus.families.rules.shard import Layout, local_shape, owned_slices

ROUND_ELEMENTS = 1 << 26
"""Elements that a rank has as whole weights at a time: 128 MiB in bfloat16, and several times that in copies."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The elements of a weight on one rank."""

    rank: int
    tp_rank: int
    start: int
    length: int


@dataclass(frozen=True)
class Weight:
    """A weight of Megatron-Core, with one or several matrices of the Hugging Face model."""

    name: str
    rule: Rule
    arch: Architecture
    device: torch.device
    tp_size: int
    holders: Sequence[Holder]
    """Ordered by ``tp_rank``, then ``start``."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.rule.canonical_shape(self.arch)

    @cached_property
    def rows(self) -> list[Tensor]:
        """The rows of each matrix, in the order of the Hugging Face tensor, on the device."""
        rows_of_parts: list[list[int]] = [[] for _ in self.rule.parts]
        for block in self.rule.blocks(self.arch):
            rows_of_parts[block.part] += range(block.at, block.at + block.length)
        return [torch.tensor(rows, device=self.device) for rows in rows_of_parts]

    @property
    def senders(self) -> Iterator[Holder]:
        """Ranks that send a part: the first of those that have it."""
        parts = (next(holders) for _, holders in itertools.groupby(self.holders, key=_place))  # HSDP has copies
        return (holder for holder in parts if self.rule.shard != "whole" or holder.tp_rank == 0)

    def layout(self, tp_rank: int) -> Layout:
        sizes = {"tp_size": self.tp_size, "etp_size": self.tp_size, "padded_vocab_size": self.arch.vocab_size}
        return Layout(tp_rank=tp_rank, etp_rank=tp_rank, **sizes)

    def gather(self, pieces: Mapping[Holder, Tensor]) -> Tensor:
        """The whole weight from the elements of its senders."""
        full_weight = next(iter(pieces.values())).new_empty(self.shape)
        for tp_rank, holders in itertools.groupby(self.senders, key=lambda holder: holder.tp_rank):
            layout = self.layout(tp_rank)
            local = torch.cat([pieces[holder] for holder in holders]).view(local_shape(self.rule, self.arch, layout))
            for owned, at in owned_slices(self.rule, self.arch, layout):
                full_weight[owned] = local[at]
        return full_weight

    def scatter(self, full_weight: Tensor) -> Iterator[tuple[Holder, Tensor]]:
        for tp_rank, holders in itertools.groupby(self.holders, key=lambda holder: holder.tp_rank):
            layout = self.layout(tp_rank)
            local = full_weight.new_empty(local_shape(self.rule, self.arch, layout))
            for owned, at in owned_slices(self.rule, self.arch, layout):
                local[at] = full_weight[owned]
            for holder in holders:
                yield holder, local.flatten()[holder.start : holder.start + holder.length]


@dataclass(frozen=True, slots=True)
class _Transfers:
    """What a rank sends, ordered by its target, and receives, ordered by its source: elements of weights by name."""

    sent: Sequence[tuple[str, Holder]]
    received: Sequence[tuple[str, Holder]]
    sent_sizes: Sequence[int]
    """Elements for each rank."""
    received_sizes: Sequence[int]

    @classmethod
    def for_rank(cls, rank: int, ranks: int, transfers: Iterable[tuple[int, int, str, Holder]]) -> _Transfers:
        """``transfers``: source, target, name and holder of all transfers of a round, in one order for all ranks."""
        sent: list[list[tuple[str, Holder]]] = [[] for _ in range(ranks)]
        received: list[list[tuple[str, Holder]]] = [[] for _ in range(ranks)]
        for source, target, name, holder in transfers:
            if source == rank:
                sent[target].append((name, holder))
            if target == rank:
                received[source].append((name, holder))
        sizes = [[sum(holder.length for _, holder in part) for part in parts] for parts in (sent, received)]
        return cls(list(itertools.chain(*sent)), list(itertools.chain(*received)), *sizes)


@dataclass(frozen=True, slots=True)
class Round:
    """Weights that are exchanged together."""

    names: Sequence[str]
    """Weights with elements on this rank."""
    owned: Sequence[Weight]
    """Weights that this rank joins and updates."""
    to_owners: _Transfers
    to_holders: _Transfers


class WeightExchange:
    """Joins weights on the ranks of a pipeline stage, and returns its elements to each rank.

    All ranks call its methods with the same rounds. Tensors are bfloat16.
    """

    def __init__(
        self,
        elements: Mapping[str, tuple[int, int]],
        rules: Mapping[str, Rule],
        arch: Architecture,
        device: torch.device,
    ) -> None:
        """``elements`` are start and number of this rank's elements of a weight in its tensor-parallel shard.

        ``rules`` are those of the weights of the whole model.
        """
        self.device = device
        self.group: dist.ProcessGroup = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        rank, ranks = self.group.rank(), self.group.size()
        tp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
        self.mine: dict[str, Holder] = {
            name: Holder(rank, tp[rules[name].is_expert].rank(), start, length)
            for name, (start, length) in elements.items()
        }
        holders_of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(holders_of_ranks, self.mine, group=self.group)
        holders: dict[str, list[Holder]] = {}
        for name, holder in itertools.chain.from_iterable(rank_holders.items() for rank_holders in holders_of_ranks):
            holders.setdefault(name, []).append(holder)
        self.weights: dict[str, Weight] = {
            name: Weight(
                name, rules[name], arch, device, tp[rules[name].is_expert].size(), sorted(weight_holders, key=_place)
            )
            for name, weight_holders in holders.items()
        }
        self.rounds: list[Round] = [
            self._round(weights, rank, ranks) for weights in _batches(self.weights.values(), ranks)
        ]

    def _round(self, weights: Sequence[Weight], rank: int, ranks: int) -> Round:
        """Weight n belongs to rank n % ranks."""
        owned = [(number % ranks, weight) for number, weight in enumerate(weights)]
        to_owners = ((holder.rank, owner, weight.name, holder) for owner, weight in owned for holder in weight.senders)
        to_holders = ((owner, holder.rank, weight.name, holder) for owner, weight in owned for holder in weight.holders)
        return Round(
            [weight.name for weight in weights if weight.name in self.mine],
            weights[rank::ranks],
            _Transfers.for_rank(rank, ranks, to_owners),
            _Transfers.for_rank(rank, ranks, to_holders),
        )

    def gather(self, now: Round, elements: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole weights that this rank owns, from the ranks' elements, flat."""
        elements_of = self._send(now.to_owners, {name: {self.mine[name]: tensor} for name, tensor in elements.items()})
        return {weight.name: weight.gather(elements_of[weight.name]) for weight in now.owned}

    def scatter(self, now: Round, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's elements of the weights, flat, from the whole weights."""
        to_send = {weight.name: dict(weight.scatter(wholes[weight.name])) for weight in now.owned}
        return {name: from_owners[self.mine[name]] for name, from_owners in self._send(now.to_holders, to_send).items()}

    def _send(
        self, transfers: _Transfers, elements: Mapping[str, Mapping[Holder, Tensor]]
    ) -> dict[str, dict[Holder, Tensor]]:
        """What the transfers bring to this rank, by weight and holder."""
        tensors = [elements[name][holder] for name, holder in transfers.sent]
        if self.group.size() > 1:
            send = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=self.device), *tensors])
            receive = send.new_empty(sum(transfers.received_sizes))
            sizes = list(transfers.received_sizes), list(transfers.sent_sizes)
            dist.all_to_all_single(receive, send, *sizes, group=self.group)
            tensors = list(receive.split([holder.length for _, holder in transfers.received]))
        received: dict[str, dict[Holder, Tensor]] = {}
        for (name, holder), tensor in zip(transfers.received, tensors, strict=True):
            received.setdefault(name, {})[holder] = tensor
        return received


def _batches(weights: Iterable[Weight], ranks: int) -> Iterator[list[Weight]]:
    """Weights of similar size, about equally many for each rank."""
    rest = sorted(weights, key=lambda weight: (-math.prod(weight.shape), weight.name))
    while rest:
        number = ranks * max(1, ROUND_ELEMENTS // math.prod(rest[0].shape))
        yield rest[:number]
        rest = rest[number:]


def _place(holder: Holder) -> tuple[int, int]:
    return holder.tp_rank, holder.start
