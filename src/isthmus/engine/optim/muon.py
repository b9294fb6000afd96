"""Muon (momentum orthogonalized by Newton-Schulz) for the hidden matrices of a model in any parallel layout.

Keller Jordan, 2024 (kellerjordan.github.io/posts/muon); the scale ``match_rms_adamw`` is that of Moonlight (arXiv
2502.16982). Momentum and main weights are sharded like those of AdamW. In each step every matrix is assembled on one
rank, orthogonalized there as a whole, and sent back: docs/decisions/0044-optimizers.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isthmus.config.schema.optim import OptimConfig
from isthmus.engine.optim.full_weights import Holder, Weight, WeightExchange
from isthmus.engine.parallel.sharded_params import local_elements
from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import Rule
from isthmus.families.rules.shard import local_shape, owned_slices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


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
    """The optimizer's copy, float32, with the gradient."""
    momentum: Tensor
    start: int
    """Number of elements before these in this rank's tensor-parallel shard."""
    group: Mapping[str, Any]
    """The parameter group, with the current learning rate and weight decay."""

    @property
    def main(self) -> Tensor:
        """The elements, flat."""
        return local_elements(self.parameter)


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
        elements = {name: (shard.start, shard.main.numel()) for name, shard in shards.items()}
        self.exchange: WeightExchange = WeightExchange(elements, rules, arch, device)
        self.scales: dict[str, list[tuple[int, int, float]]] = {
            name: _scales(self.exchange.weights[name], holder, optim.muon_scale)
            for name, holder in self.exchange.mine.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update the main weights from their gradients; a collective of the stage's ranks."""
        for now in self.exchange.rounds:
            wholes = self.exchange.gather(now, {name: self._direction(self.shards[name]) for name in now.names})
            self._orthogonalize(now.owned, wholes)
            for name, update in self.exchange.scatter(now, wholes).items():
                self._apply(name, update)

    def _direction(self, shard: Shard) -> Tensor:
        """The momentum with this step's gradient, bfloat16, flat."""
        gradient, weight = local_elements(shard.parameter.grad), self.optim.muon_momentum
        shard.momentum.lerp_(gradient, 1 - weight)
        return gradient.lerp(shard.momentum, weight).bfloat16()

    def _apply(self, name: str, update: Tensor) -> None:
        main, group = self.shards[name].main, self.shards[name].group
        main.mul_(1 - group["lr"] * group["weight_decay"])
        for start, end, scale in self.scales[name]:
            main[start:end].add_(update[start:end], alpha=-group["lr"] * scale)

    def _orthogonalize(self, weights: Sequence[Weight], wholes: Mapping[str, Tensor]) -> None:
        """In place; on a GPU matrices of one shape together, which a CPU rounds differently from single ones."""
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for weight in weights:
            weight_matrix = wholes[weight.name]
            for rows in weight.rows:
                by_shape.setdefault((len(rows), weight_matrix.size(1)), []).append((weight_matrix, rows))
        for places in by_shape.values():
            matrices = [weight_matrix[rows] for weight_matrix, rows in places]
            steps = self.optim.muon_ns_steps
            if self.exchange.device.type == "cpu":
                results: Iterable[Tensor] = [orthogonalize(matrix, steps) for matrix in matrices]
            else:
                results = orthogonalize(torch.stack(matrices), steps)
            for (weight_matrix, rows), result in zip(places, results, strict=True):
                weight_matrix[rows] = result


def _scales(weight: Weight, holder: Holder, kind: str) -> list[tuple[int, int, float]]:
    """Start, end and learning-rate factor of the elements of ``holder``: its matrices have different shapes."""
    factors = [
        0.2 * math.sqrt(max(m, n)) if kind == "match_rms_adamw" else math.sqrt(max(1, m / n))
        for m, n in weight.rule.part_shapes(weight.arch)
    ]
    row_factors = torch.empty(weight.shape[0], dtype=torch.float64)
    for block in weight.rule.blocks(weight.arch):
        row_factors[block.at : block.at + block.length] = factors[block.part]
    layout = weight.layout(holder.tp_rank)
    height, width = local_shape(weight.rule, weight.arch, layout)
    local = torch.empty(height, dtype=torch.float64)
    for owned, at in owned_slices(weight.rule, weight.arch, layout):
        local[at[0]] = row_factors[owned[0]]
    values, counts = torch.unique_consecutive(local, return_counts=True)
    ranges, end = [], -holder.start
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        start, end = end, end + count * width
        if max(0, start) < min(end, holder.length):
            ranges.append((max(0, start), min(end, holder.length), value))
    return ranges
