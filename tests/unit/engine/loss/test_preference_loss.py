"""Losses of pairs against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from isthmus.config.schema.dpo import DpoConfig
from isthmus.engine.loss.preference_loss import PreferenceObjective, pair_losses

MARGINS = torch.tensor([-7.0, -0.5, 0.0, 2.0, 30.0], dtype=torch.float64)
ZEROS = torch.zeros_like(MARGINS)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sigmoid(smoothing: float) -> None:
    settings = DpoConfig(beta=0.3, label_smoothing=smoothing)
    margins = MARGINS.clone().requires_grad_()
    losses = pair_losses(margins, torch.zeros_like(margins), settings)
    (slopes,) = torch.autograd.grad(losses.sum(), margins)
    for margin, loss, slope in zip(MARGINS.tolist(), losses.tolist(), slopes.tolist(), strict=True):
        right, wrong = sigmoid(0.3 * margin), sigmoid(-0.3 * margin)
        assert loss == pytest.approx(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong), rel=1e-12)
        assert slope == pytest.approx(0.3 * (smoothing * right - (1 - smoothing) * wrong), rel=1e-12)


def test_ipo_and_hinge() -> None:
    ipo = pair_losses(MARGINS, ZEROS, DpoConfig(beta=0.5, loss="ipo"))
    assert ipo.tolist() == [(margin - 1) ** 2 for margin in MARGINS.tolist()]
    hinge = pair_losses(MARGINS, ZEROS, DpoConfig(beta=0.5, loss="hinge"))
    assert hinge.tolist() == [max(0.0, 1 - 0.5 * margin) for margin in MARGINS.tolist()]


def test_odds_ratio_is_finite_for_certain_answers() -> None:
    settings = DpoConfig(loss="orpo", beta=2.0)
    chosen = torch.tensor([-0.7, 0.0, -1e-30, -800.0], dtype=torch.float64, requires_grad=True)
    losses = pair_losses(chosen, torch.full_like(chosen, -1.3), settings)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (-0.7, -1.3)]
    assert float(losses[0]) == pytest.approx(-2 * math.log(odds[0] / (odds[0] + odds[1])), rel=1e-12)
    (slopes,) = torch.autograd.grad(losses.sum(), chosen)
    assert losses.isfinite().all() and slopes.isfinite().all()


@pytest.mark.parametrize("loss", ["simpo", "cpo", "orpo"])
def test_losses_without_reference(loss: str) -> None:
    settings = DpoConfig.model_validate({"loss": loss})
    assert not settings.has_reference and DpoConfig().has_reference
    assert settings.nll_weight == (0.0 if loss == "simpo" else 1.0)
    assert DpoConfig.model_validate({"loss": loss, "sft_weight": 0.5}).nll_weight == 0.5


def test_metrics_are_means_over_pairs() -> None:
    metrics = PreferenceObjective(DpoConfig()).metrics({"rewards/margins": 3.0, "logps/chosen": -8.0}, 4)
    assert metrics == {"rewards/margins": 0.75, "logps/chosen": -2.0}
    assert "nll_loss" in PreferenceObjective(DpoConfig(sft_weight=1.0)).sums
