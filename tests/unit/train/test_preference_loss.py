"""Losses of pairs against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from isthmus.config.schema.dpo import DpoConfig
from isthmus.train.preference_loss import PreferenceObjective, pair_losses

MARGINS = torch.tensor([-7.0, -0.5, 0.0, 2.0, 30.0], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sigmoid(smoothing: float) -> None:
    settings = DpoConfig(beta=0.3, label_smoothing=smoothing)
    margins = MARGINS.clone().requires_grad_()
    losses = pair_losses(margins, settings)
    (slopes,) = torch.autograd.grad(losses.sum(), margins)
    for margin, loss, slope in zip(MARGINS.tolist(), losses.tolist(), slopes.tolist(), strict=True):
        right, wrong = sigmoid(0.3 * margin), sigmoid(-0.3 * margin)
        assert loss == pytest.approx(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong), rel=1e-12)
        assert slope == pytest.approx(0.3 * (smoothing * right - (1 - smoothing) * wrong), rel=1e-12)


def test_ipo_and_hinge() -> None:
    ipo = pair_losses(MARGINS, DpoConfig(beta=0.5, loss="ipo"))
    assert ipo.tolist() == [(margin - 1) ** 2 for margin in MARGINS.tolist()]
    hinge = pair_losses(MARGINS, DpoConfig(beta=0.5, loss="hinge"))
    assert hinge.tolist() == [max(0.0, 1 - 0.5 * margin) for margin in MARGINS.tolist()]


def test_metrics_are_means_over_pairs() -> None:
    metrics = PreferenceObjective(DpoConfig()).metrics({"rewards/margins": 3.0, "logps/chosen": -8.0}, 4)
    assert metrics == {"rewards/margins": 0.75, "logps/chosen": -2.0}
    assert "nll_loss" in PreferenceObjective(DpoConfig(sft_weight=1.0)).sums
