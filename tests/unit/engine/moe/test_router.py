"""Routing equals each family's formula, token by token in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from isthmus.engine.moe.router import route, weights_of
from isthmus.families.blocks.feed_forward import Experts

SIZES: dict[str, Any] = {"num_experts": 12, "top_k": 3, "ffn_hidden_size": 4}
BIAS = torch.linspace(0.4, -0.3, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(3))]
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-normalized": {"normalize": True},
    "softmax-of-chosen": {"score": "softmax_of_chosen"},
    "greedy-groups": {"num_groups": 4, "group_top_k": 2, "group_score": "max", "scaling_factor": 16.0},
    "sigmoid-biased-groups": {"score": "sigmoid", "expert_bias": True, "num_groups": 4, "group_top_k": 2}
    | {"normalize": True, "scaling_factor": 2.5},
    "softmax-biased": {"expert_bias": True, "normalize": True, "normalize_min": 0.9},
}


def by_hand(logits: list[float], bias: list[float], moe: Experts) -> dict[int, float]:
    """The experts of one token and their weights."""
    if moe.score == "softmax_of_chosen":
        chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[: moe.top_k]
        total = sum(math.exp(logits[e]) for e in chosen)
        return {e: math.exp(logits[e]) / total for e in chosen}
    total = sum(math.exp(logit) for logit in logits)
    scores = [math.exp(x) / total if moe.score == "softmax" else 1 / (1 + math.exp(-x)) for x in logits]
    merits = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // moe.num_groups
    groups = [list(range(start, start + size)) for start in range(0, len(logits), size)]
    best_of = 1 if moe.group_score == "max" else 2
    groups.sort(key=lambda group: -sum(sorted((merits[e] for e in group), reverse=True)[:best_of]))
    open_to_it = [e for group in groups[: moe.group_top_k] for e in group]
    chosen = sorted(open_to_it, key=lambda e: -merits[e])[: moe.top_k]
    divisor = max(moe.normalize_min, sum(scores[e] for e in chosen)) if moe.normalize else 1.0
    return {e: scores[e] / divisor * moe.scaling_factor for e in chosen}


@pytest.mark.parametrize("way", WAYS)
def test_routing_by_hand(way: str) -> None:
    moe = Experts(**SIZES, **WAYS[way])
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * 2
    bias = BIAS if moe.expert_bias else torch.zeros(12)
    weights, chosen = route(logits, BIAS if moe.expert_bias else None, moe)
    assert weights.dtype == torch.float32
    for token in range(50):
        expected = by_hand(logits[token].tolist(), bias.tolist(), moe)
        assert dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-5
        )


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_given_experts(way: str) -> None:
    """The formula of the router, for its own choice bit for bit, and for another order of the same experts."""
    moe = Experts(**SIZES, **WAYS[way])
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * 2
    weights, chosen = route(logits, BIAS if moe.expert_bias else None, moe)
    assert weights_of(chosen, logits, moe).equal(weights)
    torch.testing.assert_close(weights_of(chosen.flip(-1), logits, moe), weights.flip(-1))


def test_each_setting_changes_the_choice_or_the_weights() -> None:
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * 2

    def spread(way: dict[str, Any]) -> torch.Tensor:
        moe = Experts(**SIZES, **way)
        weights, chosen = route(logits, BIAS if moe.expert_bias else None, moe)
        return torch.zeros(50, 12).scatter(1, chosen, weights)

    for way in WAYS.values():
        for setting in way:
            less = {name: value for name, value in way.items() if name != setting}
            if setting == "num_groups":
                less.pop("group_top_k")
            assert not torch.allclose(spread(way), spread(less), atol=1e-3), (way, setting)


def test_the_gradient_goes_through_the_weights() -> None:
    moe = Experts(**SIZES, **WAYS["sigmoid-biased-groups"])
    logits = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, BIAS.double(), moe)[0], (logits,))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_groups": 5}, "5 groups do not divide 12 experts"),
        ({"num_groups": 4, "group_top_k": 5}, "group_top_k=5 is more than the 4 groups"),
        ({"num_groups": 12, "group_top_k": 12}, "no two best"),
        ({"num_groups": 4}, None),
        ({"num_groups": 4, "top_k": 4}, "top_k=4 is more than the 3 experts"),
        ({"top_k": 13}, "top_k=13 is more than the 12 experts"),
    ],
)
def test_invalid_router_settings_are_refused(change: dict[str, Any], why: str | None) -> None:
    result = Experts(**SIZES | change).invalid_reason()
    assert result is None if why is None else why in str(result)
