"""Experts that are drawn in training have the weights and gradients of transformers' Phi-3.5-MoE."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from isthmus.engine.layers.dropout import gumbel_noise
from isthmus.engine.moe.expert_draws import ExpertDraws
from isthmus.engine.moe.router import route
from isthmus.families.blocks.feed_forward import Experts

TOKENS, EXPERTS, JITTER = 400, 6, 0.3
MOE = Experts(num_experts=EXPERTS, top_k=2, ffn_hidden_size=4, score="sparsemixer", score_tolerance=2 * JITTER)


def test_weights_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator)
    keys = torch.randint(2**62, (TOKENS,), generator=generator)
    noise = gumbel_noise(keys, 0, 2 * (EXPERTS + 1)).float().unflatten(-1, (2, -1))
    # What transformers draws, in its order: exponential numbers of the experts, then one uniform number.
    exponential = iter((-noise[:, number, :-1]).exp() for number in range(2))
    uniform = iter((-(-noise[:, number, -1:]).exp()).exp() for number in range(2))
    monkeypatch.setattr(Tensor, "exponential_", lambda self: next(exponential))
    monkeypatch.setattr(torch, "rand_like", lambda x: next(uniform))
    monkeypatch.setattr(Tensor, "uniform_", lambda self: self)
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    weights, chosen = route(ours, None, MOE, ExpertDraws(noise))
    expected, expected_chosen = sparsemixer(theirs, JITTER, training=True)
    assert torch.equal(chosen, expected_chosen)
    best = scores.topk(2, dim=-1).indices
    assert (chosen != best).any(-1).float().mean() > 0.1
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    assert (weights < 0.4).any()
    gradient = torch.randn(weights.shape, generator=generator)
    (weights * gradient).sum().backward()
    (expected * gradient).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)
    best_weights, _ = route(scores, None, MOE)
    assert not torch.allclose(best_weights, weights)
