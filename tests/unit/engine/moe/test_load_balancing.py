"""Load-balancing losses in plain loops, the expert bias, and capacity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.moe.load_balancing import (
    ExpertLoad,
    RouterStats,
    aux_loss,
    balance_scores,
    load_stats,
    router_sums,
    token_groups,
    updated_bias,
    z_loss,
)
from isthmus.engine.moe.router import route, within_capacity
from isthmus.families.blocks.feed_forward import Experts

E, K = 6, 2


def batch(lengths: tuple[int, ...], padding: int, weights: tuple[float, ...]) -> PackedBatch:
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    return PackedBatch(input_ids=tokens, position_ids=tokens, lengths=lengths, padding=padding, sample_weights=weights)


BATCH = batch((5, 1, 7, 3), 3, (4, 1, 0, 0))
"""The third sample has no loss tokens, and the last is padding."""


def logits() -> Tensor:
    return torch.randn(16, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def by_hand(scores: Tensor, chosen: list[list[int]], spans: list[tuple[range, int]]) -> Tensor:
    """The definition, span by span."""
    total = scores.new_zeros(())
    for tokens, loss_tokens in spans:
        for expert in range(E):
            fraction = sum(chosen[token].count(expert) for token in tokens) / (K * len(tokens))
            mean = sum((scores[token, expert] for token in tokens), scores.new_zeros(())) / len(tokens)
            total = total + loss_tokens * E * fraction * mean
    return total


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_balance_losses_and_gradients_equal_the_definition(score: Any) -> None:
    moe = Experts(num_experts=E, top_k=K, ffn_hidden_size=4, score=score)
    samples, full = token_groups(BATCH, 0, 1, torch.device("cpu"))
    x = logits()
    _, chosen = route(x, None, moe)
    wanted_scores = x.sigmoid() / x.sigmoid().sum(-1, keepdim=True) if score == "sigmoid" else x.softmax(-1)
    for spans, hand in (
        (samples, [(range(5), 4), (range(5, 6), 1), (range(6, 13), 0)]),
        (full, [(range(13), 5)]),
    ):
        got = aux_loss(balance_scores(x, moe), chosen, spans)
        expected = by_hand(wanted_scores, chosen.tolist(), hand)
        assert got.item() == pytest.approx(expected.item(), rel=1e-6)
        (mine,), (theirs,) = torch.autograd.grad(got, x), torch.autograd.grad(expected, x, retain_graph=True)
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-8)
        assert not mine[13:].any()


def test_z_loss_is_a_mean_over_each_sample() -> None:
    samples, _ = token_groups(BATCH, 0, 1, torch.device("cpu"))
    x = logits()
    squares = x.exp().sum(-1).log().square()
    expected = 4 * squares[:5].mean() + squares[5]
    got = z_loss(x, samples)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(*(torch.autograd.grad(entry, x)[0] for entry in (got, expected)), rtol=1e-5)


def test_parts_of_a_sequence_have_parts_of_the_groups() -> None:
    full, _ = token_groups(BATCH, 0, 1, torch.device("cpu"))
    parts = [token_groups(BATCH, rank, 2, torch.device("cpu"))[0] for rank in range(2)]
    assert torch.equal(torch.cat([part.group_ids for part in parts]), full.group_ids)
    assert all(torch.equal(part.lengths, full.lengths) for part in parts)


def test_a_batch_of_padding_has_no_loss() -> None:
    samples, full = token_groups(batch((4,), 4, (0,)), 0, 1, torch.device("cpu"))
    x = torch.randn(4, E)
    for spans in (samples, full):
        assert aux_loss(x.softmax(-1), torch.zeros(4, K, dtype=torch.int64), spans) == 0
        assert z_loss(x, spans) == 0


def test_the_bias_follows_the_load() -> None:
    bias = updated_bias(torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([10, 0, 4, 2], dtype=torch.float64), 0.1)
    assert bias.tolist() == pytest.approx([0.4, 0.6, 0.5, 0.6])  # the mean is 4


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 6.0])
def test_capacity_keeps_the_largest_weights(factor: float) -> None:
    generator = torch.Generator().manual_seed(1)
    moe = Experts(num_experts=E, top_k=K, ffn_hidden_size=4)
    weights, chosen = route(torch.randn(20, E, generator=generator) * 2, None, moe)
    remaining = within_capacity(weights, chosen, E, factor)
    capacity = math.ceil(factor * 20 * K / E)
    for expert in range(E):
        mine = sorted(weights[chosen == expert].tolist(), reverse=True)
        assert sorted(weights[remaining == expert].tolist(), reverse=True) == mine[:capacity]
    assert ((remaining == chosen) | (remaining == E)).all()
    assert ((remaining == E).any()) == (factor < 2)


def test_share_of_replayed_choices_that_differ() -> None:
    """Padding does not count, nor the order of the experts."""
    stats = RouterStats(8)
    _, full = token_groups(batch((3, 1), 1, (3, 0)), 0, 1, torch.device("cpu"))
    chosen = torch.tensor([[3, 1], [3, 1], [2, 4], [0, 1]])
    stats.add(chosen, full, {}, torch.tensor([[1, 3], [3, 2], [2, 4], [6, 7]]))
    table = router_sums([(0, stats)], num_layers=1, num_experts=8, device=torch.device("cpu"))
    assert table[0, :8].tolist() == [0, 2, 1, 2, 1, 0, 0, 0]  # of the replayed experts
    metrics = ExpertLoad.of(load_stats(table, torch.tensor(3.0)).tolist(), ()).metrics()
    assert metrics["replay_differences"] == pytest.approx(1 / 3)


def test_load_of_a_batch_with_fewer_tokens_than_experts() -> None:
    stats = RouterStats(8)
    _, full = token_groups(batch((2,), 0, (2,)), 0, 1, torch.device("cpu"))
    stats.add(torch.tensor([[3], [3]]), full, {})
    table = router_sums([(1, stats)], num_layers=2, num_experts=8, device=torch.device("cpu"))
    assert table[:, :8].tolist() == [[0] * 8, [0, 0, 0, 2, 0, 0, 0, 0]]
    load = ExpertLoad.of(load_stats(table, torch.tensor(2.0)).tolist(), ())
    assert load.max_over_mean == 8  # 2 tokens on one expert, 1/4 on average
