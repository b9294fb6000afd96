"""Policy losses equal a plain reference, and do not depend on how answers are cut into micro batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from isthmus.config.schema.grpo import GrpoConfig, RolloutConfig
from isthmus.data.batching.packed_batch import PackedBatch, RolloutBatch
from isthmus.engine.loss.objective import LossOutput
from isthmus.engine.loss.policy_loss import PolicyObjective
from isthmus.engine.loss.sample_losses import SampleLosses

MAX_NEW_TOKENS = 10
PROMPT = 3
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "reinforce_pp")


@dataclass
class Answer:
    """Log-probabilities, float64 [n] each, and the rest of what a loss needs."""

    logps: Tensor
    entropies: Tensor
    old: Tensor
    sampling: Tensor
    reference: Tensor
    advantage: float
    weight: float = 1.0

    @classmethod
    def random(cls, tokens: int, advantage: float, *, spread: float, weight: float = 1.0) -> Answer:
        logps = -torch.rand(tokens, dtype=torch.float64) * 3
        old, sampling, reference = (logps + spread * torch.randn(tokens, dtype=torch.float64) for _ in range(3))
        entropies = torch.rand(tokens, dtype=torch.float64)
        leaves = (logps.requires_grad_(), entropies.requires_grad_())
        return cls(*leaves, old, sampling, reference, advantage, weight)


def answers(spread: float = 0.3) -> list[Answer]:
    torch.manual_seed(0)
    cases = ((4, 1.3, 1.0), (9, -0.7, 1.0), (1, 0.4, 1.0), (6, 2.0, 0.0), (5, -1.1, 1.0), (3, 0.0, 1.0))
    return [Answer.random(tokens, advantage, spread=spread, weight=weight) for tokens, advantage, weight in cases]


@dataclass
class Settings:
    loss: str = "grpo"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> GrpoConfig:
        return GrpoConfig.model_validate({"loss": self.loss, **self.more})

    @property
    def objective(self) -> PolicyObjective:
        return PolicyObjective(self.config, RolloutConfig(max_new_tokens=MAX_NEW_TOKENS))


def packed(samples: list[Answer], total: list[Answer], *, first_update: bool = False, first: int = 0) -> PackedBatch:
    """A micro batch: each answer after a prompt, and two tokens of padding."""
    lengths = [PROMPT + len(answer.logps) for answer in samples]
    mask = torch.cat([torch.arange(n) >= PROMPT for n in lengths] + [torch.zeros(2, dtype=torch.bool)])

    def spread(values: Iterable[Tensor]) -> Tensor:
        result = torch.zeros(len(mask), dtype=torch.float64)
        result[mask] = torch.cat([value.detach() for value in values])
        return result

    rollout = RolloutBatch(
        temperature=1.0,
        advantages=torch.tensor([answer.advantage for answer in samples], dtype=torch.float64),
        weights=torch.tensor([answer.weight for answer in samples], dtype=torch.float64),
        sampling_logps=spread(answer.sampling for answer in samples),
        old_logps=None if first_update else spread(answer.old for answer in samples),
        reference_logps=spread(answer.reference for answer in samples),
        total_tokens=round(sum(len(answer.logps) * answer.weight for answer in total)),
        total_answers=len(total),
    )
    zeros = torch.zeros(len(mask), dtype=torch.int64)
    return PackedBatch(
        input_ids=zeros,
        position_ids=torch.cat([*map(torch.arange, lengths), zeros[:2]]),
        lengths=(*lengths, 2),
        padding=2,
        labels=zeros,
        loss_mask=mask,
        loss_tokens=(*(len(answer.logps) for answer in samples), 0),
        sample_ids=tuple(range(first, first + len(samples))),
        rollout=rollout,
    )


def values_of(samples: list[Answer]) -> Tensor:
    losses, entropies = (torch.cat([part(answer) for answer in samples]) for part in (lambda a: -a.logps, _entropies))
    return torch.stack([losses, entropies])


def _entropies(answer: Answer) -> Tensor:
    return answer.entropies


def run(objective: PolicyObjective, parts: list[list[Answer]], **options: Any) -> tuple[list[LossOutput], float, float]:
    """The outputs of micro batches, and the mean loss and the metrics' count."""
    total = [answer for part in parts for answer in part]
    outputs, first = [], 0
    for part in parts:
        batch = packed(part, total, first=first, **options)
        outputs.append(objective.loss(values_of(part), batch, loss_tokens=0, mtp_tokens=0, mtp_weight=0.0))
        first += len(part)
    count = sum(output.count for output in outputs)
    return outputs, sum(float(output.loss_sum) for output in outputs) / count, count


def gradients(outputs: list[LossOutput], count: float, samples: list[Answer]) -> list[Tensor]:
    loss = torch.stack([output.loss for output in outputs]).sum() / count
    leaves = [leaf for answer in samples for leaf in (answer.logps, answer.entropies)]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def reference_loss(samples: list[Answer], settings: Settings, *, first_update: bool = False) -> Tensor:
    """The mean loss of all answers, one token after the other."""
    config = settings.config
    low, high = config.clips
    by_answer, by_token, entropies = [], [], []
    for answer in samples:
        old = answer.logps.detach() if first_update else answer.old
        n = len(answer.logps)
        correction = torch.ones(n, dtype=torch.float64)
        if config.correction == "token":
            correction = (old - answer.sampling).exp().clamp(max=config.correction_cap)
        elif config.correction != "none":
            mismatch = math.exp(float((old - answer.sampling).sum()))
            is_masked = config.correction == "mask" and mismatch > config.correction_cap
            correction = correction * (0 if is_masked else min(mismatch, config.correction_cap))
        terms = []
        for t in range(n):
            ratio = (answer.logps[t] - old[t]).exp()
            if settings.loss == "gspo":
                ratio = (answer.logps - old).mean().exp()
            elif settings.loss == "rloo":
                ratio = (answer.logps - old).sum().exp()
            bounded = ratio.clamp(1 - low, 1 + high)
            if settings.loss == "cispo":
                term = -bounded.detach() * answer.advantage * answer.logps[t]
            else:
                term = -torch.min(ratio * answer.advantage, bounded * answer.advantage)
            term = term * correction[t]
            if config.kl_weight and settings.loss != "rloo":
                gap = answer.reference[t] - answer.logps[t]
                kl = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - gap - 1}[config.kl_estimator]
                if config.kl_ratio:
                    kl = kl * (ratio.detach() if config.kl_estimator == "k2" else ratio)
                term = term + config.kl_weight * kl
            terms.append(term * answer.weight)
        entropies += [entropy for entropy in answer.entropies if answer.weight]
        by_token += [term for term in terms if answer.weight]
        total = torch.stack(terms).sum()
        by_answer.append(total / (MAX_NEW_TOKENS if settings.loss == "dr_grpo" else n))
    means_of_answers = settings.loss in ("grpo", "dr_grpo", "gspo", "rloo")
    loss = torch.stack(by_answer if means_of_answers else by_token).mean()
    return loss - config.entropy_weight * torch.stack(entropies).mean()


CASES = {
    "plain": {},
    "kl-k1": {"kl_weight": 0.3, "kl_estimator": "k1"},
    "kl-k2": {"kl_weight": 0.3, "kl_estimator": "k2"},
    "kl-k3": {"kl_weight": 0.3},
    "kl-as-in-grpo": {"kl_weight": 0.3, "kl_ratio": False},
    "entropy": {"entropy_weight": 0.2},
    "token": {"correction": "token", "correction_cap": 1.2},
    "sequence": {"correction": "sequence", "correction_cap": 1.2},
    "mask": {"correction": "mask", "correction_cap": 1.2},
    "clips": {"clip_low": 0.05, "clip_high": 0.1},
}


def losses_and_cases() -> list[Any]:
    """Each loss with the plain case, and each case with one loss, in turn; the others are swept."""
    losses = list(LOSSES)
    return [
        pytest.param(
            loss, more, id=f"{loss}-{name}",
            marks=[] if number == 0 or losses[number % len(losses)] == loss else pytest.mark.sweep,
        )
        for loss in losses
        for number, (name, more) in enumerate(CASES.items())
        if loss != "rloo" or not more.keys() & {"kl_estimator", "kl_ratio"}
    ]  # fmt: skip


@pytest.mark.parametrize(("loss", "more"), losses_and_cases())
def test_loss_and_gradient_equal_the_reference(loss: str, more: dict[str, Any]) -> None:
    """Also for answers in two micro batches."""
    samples, settings = answers(), Settings(loss, more)
    expected = reference_loss(samples, settings)
    leaves = [leaf for answer in samples for leaf in (answer.logps, answer.entropies)]
    expected_gradients = torch.autograd.grad(expected, leaves, allow_unused=True, materialize_grads=True)
    for parts in ([samples], [samples[:2], samples[2:]]):
        outputs, mean, count = run(settings.objective, parts)
        assert mean == pytest.approx(expected.item(), abs=1e-12)
        for result, gradient in zip(gradients(outputs, count, samples), expected_gradients, strict=True):
            torch.testing.assert_close(result, gradient, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_update_has_the_gradient_of_reinforce(loss: str) -> None:
    """All ratios are 1."""
    samples, settings = answers(), Settings(loss)
    outputs, _, count = run(settings.objective, [samples], first_update=True)
    expected_loss = reference_loss(samples, settings, first_update=True)
    leaves = [answer.logps for answer in samples]
    expected = torch.autograd.grad(expected_loss, leaves, allow_unused=True, materialize_grads=True)
    results = gradients(outputs, count, samples)[::2]
    for answer, result, gradient in zip(samples, results, expected, strict=True):
        torch.testing.assert_close(result, gradient, atol=1e-7, rtol=1e-6)
        # Parallel to the advantage, and the same for each token.
        assert torch.equal(result.sign(), torch.full_like(result, -answer.advantage * answer.weight).sign())
    assert outputs[0].sums["ratio_mean"] == (5 if loss in ("gspo", "rloo") else 22)


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_metrics(loss: str) -> None:
    """Means over the tokens of answers with weight; the ratios of gspo over these answers."""
    samples, settings = answers(), Settings(loss, {"clip_low": 0.05, "clip_high": 0.1, "kl_weight": 0.5})
    objective = settings.objective
    outputs, _, count = run(objective, [samples[:3], samples[3:]])
    sums = {name: sum(float(output.sums[name]) for output in outputs) for name in objective.sums}
    metrics = objective.metrics(sums, count)
    chosen = [answer for answer in samples if answer.weight]
    differences = torch.cat([(answer.old - answer.sampling).abs() for answer in chosen])
    assert metrics["entropy"] == pytest.approx(float(torch.cat([a.entropies for a in chosen]).mean().detach()))
    assert metrics["logp_difference_mean"] == pytest.approx(float(differences.mean()))
    ratios, advantages, divergences = [], [], []
    for answer in chosen:
        log_ratios = (answer.logps - answer.old).detach()
        ratios.append(log_ratios.mean()[None].exp() if loss == "gspo" else log_ratios.exp())
        advantages.append(torch.full_like(ratios[-1], answer.advantage))
        gaps = answer.reference - answer.logps.detach()
        divergences.append((gaps.exp() - gaps - 1) * ratios[-1])
    assert metrics["kl"] == pytest.approx(float(torch.cat(divergences).mean()))
    ratio, advantage = torch.cat(ratios), torch.cat(advantages)
    low, high = ((ratio < 0.95) & (advantage < 0)).double(), ((ratio > 1.1) & (advantage > 0)).double()
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert metrics["clip_ratio/low_mean"] == pytest.approx(float(low.mean()))
    assert metrics["clip_ratio/high_mean"] == pytest.approx(float(high.mean()))
    assert metrics["clip_ratio/region_mean"] == pytest.approx(float((low + high).mean())) and (low + high).any()


def test_the_peak_is_the_largest_difference_of_a_step() -> None:
    """Over its micro batches, with the sample and the position in it; the next step starts anew."""
    samples, objective = answers(), Settings().objective
    samples[4] = replace(samples[4], sampling=samples[4].old.clone())
    samples[4].sampling[2] += 50.0
    run(objective, [samples[:3], samples[3:]])
    peak = objective.take_peak()
    assert peak is not None and peak.tolist() == [pytest.approx(50.0), 4, PROMPT + 2 + 1]
    assert objective.take_peak() is None


def test_a_difference_that_is_no_number_is_the_peak() -> None:
    samples, objective = answers(), Settings().objective
    samples[1].sampling[3] = math.nan
    run(objective, [samples])
    peak = objective.take_peak()
    assert peak is not None and peak.tolist() == [math.inf, 1, PROMPT + 3 + 1]


def test_entropies_have_a_gradient_only_for_the_bonus() -> None:
    assert Settings().objective.per_token == "policy"
    assert Settings(more={"entropy_weight": 0.1}).objective.per_token == "policy_entropy"


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_losses_of_single_answers(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up to the loss of the batch, and answers with weight 0 have none."""
    samples, objective = answers(), Settings(loss).objective
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    recorder = SampleLosses(objective)
    assert recorder.per_token == objective.per_token
    recorder.loss(values_of(samples), packed(samples, samples), loss_tokens=0, mtp_tokens=0, mtp_weight=0.0)
    outputs, _, _ = run(objective, [samples])
    assert sum(result.loss for result in recorder.losses) == pytest.approx(float(outputs[0].loss_sum))
    assert [result.sample for result in recorder.losses] == list(range(6)) and recorder.losses[3].loss == 0
