"""This rank's experts: separate parameters, as in checkpoints, computed as grouped GEMMs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from isthmus.engine.moe.grouped_gemm import grouped_linear


class GroupedExperts(SequentialMLP):
    """Feed-forward blocks with inputs sorted by expert, last expert first, like the weights in the DDP buffers."""

    def __init__(self, *args: Any, own_copies: bool) -> None:
        """``own_copies``: the experts' data-parallel group differs from that of the other layers."""
        super().__init__(*args)
        for expert in self.local_experts:
            for parameter in expert.parameters():
                parameter.allreduce = not own_copies
            if (bias := expert.linear_fc2.bias) is not None:
                # Megatron-Core sums it over tp; here each rank has all tokens and the whole gradient.
                bias.sequence_parallel = False
                # All etp ranks have it: the gradient norm counts it on the first of them, whatever its tp rank is.
                if own_copies:
                    bias.tensor_model_parallel = self.tp_group.rank() == 0
                    bias.shared = self.tp_group.rank() != 0

    def forward(self, hidden: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """``hidden`` [n, H] is sorted by expert, ``weights`` [n] scale the results, ``counts`` int64 [local experts].

        With tensor-parallel experts the result is this rank's part of a sum.
        """
        experts = list(reversed(self.local_experts))
        weights = weights.to(hidden.dtype)[:, None]
        wide = grouped_linear(hidden, counts, [expert.linear_fc1.weight for expert in experts])
        if experts[0].linear_fc1.bias is not None:
            wide = wide + _by_row([expert.linear_fc1.bias for expert in experts], counts, wide)
        inner = experts[0].activation_func(wide) * weights
        out = grouped_linear(inner, counts, [expert.linear_fc2.weight for expert in experts])
        if experts[0].linear_fc2.bias is None:
            return out
        # The ranks' parts are summed: each adds its share of the bias, and the gradient is that of the whole bias.
        bias = _by_row([expert.linear_fc2.bias for expert in experts], counts, out)
        return torch.addcmul(out, bias + bias.detach() * (1 / self.tp_group.size() - 1), weights)


def _by_row(biases: list[Tensor], counts: Tensor, rows: Tensor) -> Tensor:
    return torch.stack(biases).repeat_interleave(counts, dim=0, output_size=rows.size(0))
