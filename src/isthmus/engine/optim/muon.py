"""Muon (momentum orthogonalized by Newton-Schulz) for the hidden matrices of a model in any parallel layout.

Keller Jordan, 2024 (kellerjordan.github.io/posts/muon); the scale ``match_rms_adamw`` is that of Moonlight (arXiv
2502.16982). Momentum and main weights are sharded like those of AdamW. In each step every matrix is assembled on one
rank, orthogonalized there as a whole, and sent back: docs/decisions/0044-optimizers.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from isthmus.config.schema.optim import OptimConfig
from isthmus.engine.parallel.sharded_params import local_elements
from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import Rule
from isthmus.families.rules.shard import Layout, local_shape, owned_slices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
ROUND_ELEMENTS = 1 << 26
"""Elements that a rank orthogonalizes at a time: 128 MiB in bfloat16, and several times that in temporary memory."""


@torch.no_grad()
def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximate U V^T of bfloat16 matrices [..., M, N] = U S V^T, as ``torch.optim.Muon`` does; overwrites them."""
    a, b, c = COEFFICIENTS
    transposed = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if transposed else matrices
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS))
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if transposed else x


class Shard(NamedTuple):
    """This rank's elements of a weight."""

    parameter: Tensor
    """Of the optimizer, float32, with the gradient."""
    momentum: Tensor
    start: int
    """Number of elements before these in this rank's tensor-parallel shard."""
    group: Mapping[str, Any]
    """The parameter group, with the current learning rate and weight decay."""

    @property
    def main(self) -> Tensor:
        """The elements, flat."""
        return local_elements(self.parameter)


@dataclass(frozen=True, slots=True)
class _Holder:
    """The elements of a weight on one rank."""

    rank: int
    tp_rank: int
    start: int
    length: int


@dataclass(frozen=True)
class _Weight:
    """A weight of Megatron-Core, with one or several matrices of the Hugging Face model."""

    name: str
    rule: Rule
    arch: Architecture
    device: torch.device
    tp_size: int
    holders: Sequence[_Holder]
    """Ordered by ``tp_rank``, then ``start``."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.rule.canonical_shape(self.arch)

    @cached_property
    def rows(self) -> list[Tensor]:
        """The rows of each matrix, in the order of the Hugging Face tensor, on the device."""
        found: list[list[int]] = [[] for _ in self.rule.parts]
        for block in self.rule.blocks(self.arch):
            found[block.part] += range(block.at, block.at + block.length)
        return [torch.tensor(rows, device=self.device) for rows in found]

    @property
    def senders(self) -> Iterator[_Holder]:
        """Of replicated weights, one replica sends."""
        return (holder for holder in self.holders if self.rule.shard != "whole" or holder.tp_rank == 0)

    def layout(self, tp_rank: int) -> Layout:
        sizes = {"tp_size": self.tp_size, "etp_size": self.tp_size, "padded_vocab_size": self.arch.vocab_size}
        return Layout(tp_rank=tp_rank, etp_rank=tp_rank, **sizes)

    def gather(self, pieces: Mapping[_Holder, Tensor]) -> Tensor:
        """The whole weight from the elements of its senders."""
        whole = next(iter(pieces.values())).new_empty(self.shape)
        for tp_rank, holders in itertools.groupby(self.senders, key=lambda holder: holder.tp_rank):
            layout = self.layout(tp_rank)
            local = torch.cat([pieces[holder] for holder in holders]).view(local_shape(self.rule, self.arch, layout))
            for owned, at in owned_slices(self.rule, self.arch, layout):
                whole[owned] = local[at]
        return whole

    def scatter(self, whole: Tensor) -> Iterator[tuple[_Holder, Tensor]]:
        for tp_rank, holders in itertools.groupby(self.holders, key=lambda holder: holder.tp_rank):
            layout = self.layout(tp_rank)
            local = whole.new_empty(local_shape(self.rule, self.arch, layout))
            for owned, at in owned_slices(self.rule, self.arch, layout):
                local[at] = whole[owned]
            for holder in holders:
                yield holder, local.flatten()[holder.start : holder.start + holder.length]

    def scales(self, holder: _Holder, kind: str) -> list[tuple[int, int, float]]:
        """Start, end and learning-rate factor of the elements of ``holder``: its matrices have different shapes."""
        factors = [
            0.2 * math.sqrt(max(m, n)) if kind == "match_rms_adamw" else math.sqrt(max(1, m / n))
            for m, n in self.rule.part_shapes(self.arch)
        ]
        of_row = torch.empty(self.shape[0], dtype=torch.float64)
        for block in self.rule.blocks(self.arch):
            of_row[block.at : block.at + block.length] = factors[block.part]
        layout = self.layout(holder.tp_rank)
        height, width = local_shape(self.rule, self.arch, layout)
        local = torch.empty(height, dtype=torch.float64)
        for owned, at in owned_slices(self.rule, self.arch, layout):
            local[at[0]] = of_row[owned[0]]
        values, counts = torch.unique_consecutive(local, return_counts=True)
        found, end = [], -holder.start
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            start, end = end, end + count * width
            if max(0, start) < min(end, holder.length):
                found.append((max(0, start), min(end, holder.length), value))
        return found


class Muon:
    """The update of the matrices of one pipeline stage; its ranks step together."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        rules: Mapping[str, Rule],
        arch: Architecture,
        optim: OptimConfig,
        device: torch.device,
    ) -> None:
        """``shards`` are those of this rank and ``rules`` those of the whole model, by canonical name."""
        self.optim = optim
        self.shards = shards
        self.device = device
        self.group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self.rank, ranks = self.group.rank(), self.group.size()
        tp: dict[bool, tuple[int, int]] = {}  # rank and size of the weights of experts, and of others
        for of_expert, tensor_parallel in (
            (False, parallel_state.get_tensor_model_parallel_group()),
            (True, parallel_state.get_expert_tensor_parallel_group()),
        ):
            tp[of_expert] = (tensor_parallel.rank(), tensor_parallel.size())
        self.mine = {
            name: _Holder(self.rank, tp[rules[name].is_expert][0], shard.start, shard.main.numel())
            for name, shard in shards.items()
        }
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, self.mine, group=self.group)
        holders: dict[str, list[_Holder]] = {}
        for name, holder in itertools.chain.from_iterable(each.items() for each in every):
            holders.setdefault(name, []).append(holder)
        weights = [
            _Weight(
                name, rules[name], arch, device, tp[rules[name].is_expert][1],
                sorted(found, key=lambda holder: (holder.tp_rank, holder.start)),
            )
            for name, found in holders.items()
        ]  # fmt: skip
        self.rounds = list(_rounds(weights, ranks))
        self.scales = {
            weight.name: weight.scales(self.mine[weight.name], optim.muon_scale)
            for weight in weights
            if weight.name in self.mine
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update the main weights from their gradients, which it removes; a collective of the stage's ranks."""
        for owners in self.rounds:
            names = [weight.name for _, weight in _owned(owners) if weight.name in self.shards]
            directions = {name: self._direction(self.shards[name]) for name in names}
            to_owners = [
                _Transfer(holder.rank, owner, weight.name, holder)
                for owner, weight in _owned(owners)
                for holder in weight.senders
            ]
            gathered = self._exchange(to_owners, {name: {self.mine[name]: directions[name]} for name in names})
            wholes = {weight.name: weight.gather(gathered[weight.name]) for weight in owners[self.rank]}
            self._orthogonalize(owners[self.rank], wholes)
            updates = {weight.name: dict(weight.scatter(wholes[weight.name])) for weight in owners[self.rank]}
            to_holders = [
                _Transfer(owner, holder.rank, weight.name, holder)
                for owner, weight in _owned(owners)
                for holder in weight.holders
            ]
            for name, update in self._exchange(to_holders, updates).items():
                self._apply(name, update[self.mine[name]])

    def _direction(self, shard: Shard) -> Tensor:
        """The momentum with this step's gradient, bfloat16, flat."""
        gradient, weight = local_elements(shard.parameter.grad), self.optim.muon_momentum
        shard.momentum.lerp_(gradient, 1 - weight)
        shard.parameter.grad = None  # AdamW leaves it out
        return gradient.lerp(shard.momentum, weight).bfloat16()

    def _apply(self, name: str, update: Tensor) -> None:
        main, group = self.shards[name].main, self.shards[name].group
        main.mul_(1 - group["lr"] * group["weight_decay"])
        for start, end, scale in self.scales[name]:
            main[start:end].add_(update[start:end], alpha=-group["lr"] * scale)

    def _orthogonalize(self, weights: Sequence[_Weight], wholes: Mapping[str, Tensor]) -> None:
        """In place; on a GPU matrices of one shape together, which a CPU rounds differently from single ones."""
        of_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for weight in weights:
            whole = wholes[weight.name]
            for rows in weight.rows:
                of_shape.setdefault((len(rows), whole.size(1)), []).append((whole, rows))
        for places in of_shape.values():
            matrices = [whole[rows] for whole, rows in places]
            steps = self.optim.muon_ns_steps
            if self.device.type == "cpu":
                results: Iterable[Tensor] = [orthogonalize(matrix, steps) for matrix in matrices]
            else:
                results = orthogonalize(torch.stack(matrices), steps)
            for (whole, rows), result in zip(places, results, strict=True):
                whole[rows] = result

    def _exchange(
        self, transfers: Sequence[_Transfer], own: Mapping[str, Mapping[_Holder, Tensor]]
    ) -> dict[str, dict[_Holder, Tensor]]:
        """What the transfers bring to this rank, by weight and holder; all ranks give the same transfers.

        ``own`` are this rank's tensors, bfloat16, flat.
        """
        given = sorted((each for each in transfers if each.source == self.rank), key=lambda each: each.target)
        taken = sorted((each for each in transfers if each.target == self.rank), key=lambda each: each.source)
        tensors = [own[each.name][each.holder] for each in given]
        if (ranks := self.group.size()) > 1:
            send = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=self.device), *tensors])
            receive = send.new_empty(sum(each.holder.length for each in taken))
            receive_sizes, send_sizes = [0] * ranks, [0] * ranks
            for each in taken:
                receive_sizes[each.source] += each.holder.length
            for each in given:
                send_sizes[each.target] += each.holder.length
            dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self.group)
            tensors = list(receive.split([each.holder.length for each in taken]))
        found: dict[str, dict[_Holder, Tensor]] = {}
        for each, tensor in zip(taken, tensors, strict=True):
            found.setdefault(each.name, {})[each.holder] = tensor
        return found


class _Transfer(NamedTuple):
    source: int
    target: int
    name: str
    holder: _Holder


def _owned(owners: Sequence[Sequence[_Weight]]) -> Iterator[tuple[int, _Weight]]:
    return ((owner, weight) for owner, weights in enumerate(owners) for weight in weights)


def _rounds(weights: Iterable[_Weight], ranks: int) -> Iterator[list[list[_Weight]]]:
    """Weights of similar size for each rank, round after round."""
    rest = sorted(weights, key=lambda weight: (-math.prod(weight.shape), weight.name))
    while rest:
        number = ranks * max(1, ROUND_ELEMENTS // math.prod(rest[0].shape))
        now, rest = rest[:number], rest[number:]
        yield [now[rank::ranks] for rank in range(ranks)]
