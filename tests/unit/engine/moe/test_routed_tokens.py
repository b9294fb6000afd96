"""Tokens with dropped choices: padding instead of reading their number gives the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.engine.moe.grouped_gemm import GroupSizes, grouped_linear
from isthmus.engine.moe.routed_tokens import RoutedTokens, expert_capacity
from isthmus.engine.moe.router import route, within_capacity
from isthmus.engine.moe.token_dispatcher import Keep, run_local
from isthmus.families.blocks.feed_forward import Experts

E, K, T, H = 5, 2, 20, 8


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.5, 9.0])
def test_padding_equals_reading_the_number_of_dropped_choices(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator)
    logits = torch.randn(T, E, generator=generator) * 2
    experts = [torch.randn(H, H, generator=generator).requires_grad_() for _ in range(E)]
    rows: list[int] = []

    def compute(x: Tensor, weights: Tensor, sizes: GroupSizes) -> Tensor:
        rows.append(x.size(0))
        assert sum(sizes.on_host) == x.size(0) and sizes.ends.tolist()[-1] == x.size(0)
        return grouped_linear(x * weights[:, None], sizes, experts)

    def run(keep: Keep) -> list[Tensor]:
        x, score = hidden.clone().requires_grad_(), logits.clone().requires_grad_()
        weights, chosen = route(score, None, Experts(num_experts=E, top_k=K, ffn_hidden_size=4))
        chosen = within_capacity(weights, chosen, E, factor)
        out = run_local(x, weights, chosen, compute, range(E), keep)
        return [out, *torch.autograd.grad(out.square().sum(), (x, score, *experts))]

    bound = E * expert_capacity(T * K, E, factor)
    expected, result = run(RoutedTokens.keep_counted), run(lambda routed: routed.keep_at_most(bound))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(result, expected, strict=True))
    assert rows[1] == min(bound, T * K) >= rows[0]
    assert (rows[0] < T * K) == (factor < 1.5)  # choices were dropped
