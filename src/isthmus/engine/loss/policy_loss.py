"""Losses of generated answers: GRPO and its relatives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config.schema.grpo import GrpoConfig, RolloutConfig
from isthmus.data.batching.packed_batch import PackedBatch, RolloutBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.loss.objective import LossOutput, PerToken, counts_batch, sample_sums
from isthmus.engine.parallel.context_parallel import local_tokens


def clipped_losses(ratios: Tensor, advantages: Tensor, clips: tuple[float, float]) -> Tensor:
    """The clipped surrogate of PPO, negated (equation 7 of arXiv 1707.06347); all tensors have the same shape."""
    low, high = clips
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages)


def weighted_losses(logps: Tensor, ratios: Tensor, advantages: Tensor, clips: tuple[float, float]) -> Tensor:
    """REINFORCE with clipped ratios as constant weights (CISPO: equations 4 and 5 of arXiv 2506.13585)."""
    low, high = clips
    return -ratios.detach().clamp(1 - low, 1 + high) * advantages * logps


def divergences(logps: Tensor, reference_logps: Tensor, estimator: str) -> Tensor:
    """Estimates of the KL divergence from the reference for each token (J. Schulman, "Approximating KL Divergence").

    k1 is the log ratio, k2 half of its square, k3 (equation 4 of arXiv 2402.03300) is never negative, without bias.
    """
    log_ratios = logps - reference_logps
    if estimator == "k1":
        return log_ratios
    if estimator == "k2":
        return log_ratios.square() / 2
    return torch.expm1(-log_ratios) + log_ratios


class PolicyObjective:
    """The policy loss of the answers of the global batch.

    With A the advantage of an answer of n tokens, r the ratio of the token's probability to that before the first
    update, and the surrogate L(r) of :func:`clipped_losses`:

    - ``grpo``: mean over answers of the mean of L(r) over their tokens (equation 3 of arXiv 2402.03300).
    - ``dr_grpo``: mean over answers of the sum, divided by ``rollout.max_new_tokens`` (arXiv 2503.20783).
    - ``dapo`` (equation 8 of arXiv 2503.14476), ``bnpo``, ``reinforce_pp`` (arXiv 2501.03262): mean over tokens. They
      differ in their default settings.
    - ``cispo``: mean over tokens of :func:`weighted_losses`.
    - ``gspo``: mean over answers of L(s), with s the geometric mean of the ratios (equations 5 and 7 of arXiv
      2507.18071).
    - ``rloo``: mean over answers of L of the product of the ratios, as in TRL's RLOOTrainer; in the first update its
      gradient is that of arXiv 2402.14740. Its KL divergence is part of the reward and not of this loss.

    Means are over the global batch, for every layout and micro batch size. TRL's bnpo takes the mean over a micro
    batch. Answers with weight 0 have no loss; as in TRL their tokens do not count in a mean over tokens, and they do
    count in a mean over answers.
    """

    samples_per_unit = 1
    peak_name = "logp_difference_max"
    sums: tuple[str, ...] = (
        "entropy",
        "kl",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "ratio_mean",
        "logp_difference_mean",
        "correction_mean",
        "tokens",
        "answers",
    )

    def __init__(self, grpo: GrpoConfig, rollout: RolloutConfig) -> None:
        self.settings = grpo
        self.max_new_tokens: int = rollout.max_new_tokens
        self.per_token: PerToken = "policy_entropy" if grpo.entropy_weight else "policy"
        self._peak: Tensor | None = None

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        """What each answer adds to the count, zero for padding."""
        samples = len(batch.sample_lengths)
        if self.settings.averages_answers:
            weights: tuple[float, ...] = (1.0,) * samples
        else:
            weights = tuple(n * weight for n, weight in zip(batch.loss_tokens, _weights(batch).tolist(), strict=False))
        return weights + (0.0,) * (len(batch.lengths) - samples)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """The summed loss; ``losses``: cross entropies and entropies of the loss tokens, float32 [2, n]."""
        answers, sums = self._answer_losses(losses, batch)
        total, counted = answers.sum(), int(counts_batch())
        count = counted * round(sum(self.sample_weights(batch)))
        return LossOutput(total.float(), count, counted * total.detach(), sums)

    def answer_losses(self, values: Tensor, batch: PackedBatch) -> Tensor:
        """Each answer's part of the loss sum, float64 [answers]; ``values`` as in :meth:`loss`."""
        return self._answer_losses(values, batch)[0]

    def take_peak(self) -> Tensor | None:
        """Largest difference of log-probabilities of a loss token in training and generation, with its place."""
        peak, self._peak = self._peak, None
        return peak

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means with TRL's names: of ratios over what has a ratio (tokens or answers), others over tokens.

        ``clip_ratio``: the share of clipped ratios that advantages would push further beyond the limit. ``kl``: only if
        it is a part of the loss. ``logp_difference_mean``: of log-probabilities in training and in generation, of the
        weights that generated. ``correction_mean``: of the factors of a correction.
        """
        tokens = max(1.0, sums["tokens"])
        ratios = max(1.0, sums["answers"]) if self.settings.has_answer_ratios else tokens
        low, high = sums["clip_ratio/low_mean"] / ratios, sums["clip_ratio/high_mean"] / ratios
        result = {
            "entropy": sums["entropy"] / tokens,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "ratio_mean": sums["ratio_mean"] / ratios,
            "logp_difference_mean": sums["logp_difference_mean"] / tokens,
        }
        if self.settings.correction != "none":
            result["correction_mean"] = sums["correction_mean"] / tokens
        has_kl = self.settings.kl_weight and not self.settings.penalizes_rewards
        return result | ({"kl": sums["kl"] / tokens} if has_kl else {})

    def _answer_losses(self, values: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
        settings, tokens = self.settings, _Tokens(batch, values.device)
        logps, entropies = -values[0].double(), values[1].double()
        sampling_logps = tokens.of_sequence(tokens.rollout.sampling_logps)
        old_logps = tokens.of_sequence(tokens.rollout.old_logps)
        if old_logps is None:
            old_logps = logps.detach()
        assert sampling_logps is not None
        policy_logps = tokens.of_sequence(tokens.rollout.policy_logps)
        differences = ((old_logps if policy_logps is None else policy_logps) - sampling_logps).abs()
        self._keep_peak(differences, tokens)

        advantages, weights = tokens.of_answers(tokens.advantages), tokens.of_answers(tokens.weights)
        corrections = self._corrections(old_logps - sampling_logps, tokens)
        divergence, log_ratios = self._divergences(logps, tokens), logps - old_logps
        if settings.has_answer_ratios:
            # Each rank of context parallelism has the whole loss of an answer: per-token values are summed first.
            exponents = tokens.sums(log_ratios)
            ratios = (exponents / tokens.lengths if settings.loss == "gspo" else exponents).exp()
            answers = clipped_losses(ratios, tokens.advantages, settings.clips)
            answers = answers * (tokens.sums(corrections) / tokens.lengths)
            divergence = self._weighted(tokens.sums(divergence), ratios)
            answers = answers + settings.kl_weight * divergence / tokens.lengths
            ratio_weights = int(counts_batch()) * tokens.weights
            ratio_sums = self._ratio_sums(ratios, tokens.advantages, ratio_weights)
        else:
            ratios = log_ratios.exp()
            if settings.loss == "cispo":
                losses = weighted_losses(logps, ratios, advantages, settings.clips)
            else:
                losses = clipped_losses(ratios, advantages, settings.clips)
            divergence, ratio_weights = self._weighted(divergence, ratios), weights
            answers = tokens.sums(losses * corrections + settings.kl_weight * divergence)
            if settings.loss == "grpo":
                answers = answers / tokens.lengths
            elif settings.loss == "dr_grpo":
                answers = answers / self.max_new_tokens
            ratio_sums = self._ratio_sums(ratios, advantages, ratio_weights)
        if settings.entropy_weight:
            # The bonus is a mean over tokens for every loss; its sum is divided by the count of the loss.
            share = 1.0
            if settings.averages_answers:
                share = tokens.rollout.total_answers / max(1, tokens.rollout.total_tokens)
            answers = answers - settings.entropy_weight * share * tokens.sums(entropies)
        sums: dict[str, Tensor | float] = {
            "entropy": (entropies.detach() * weights).sum(),
            "kl": (divergence.detach() * ratio_weights).sum(),
            **ratio_sums,
            "logp_difference_mean": (differences * weights).sum(),
            "correction_mean": (corrections * weights).sum(),
            "tokens": weights.sum(),
            "answers": int(counts_batch()) * tokens.weights.sum(),
        }
        return answers * tokens.weights, sums

    def _divergences(self, logps: Tensor, tokens: _Tokens) -> Tensor:
        """Estimated divergence from the reference of each token, [n], zero without a reference."""
        reference_logps = tokens.of_sequence(tokens.rollout.reference_logps)
        if not self.settings.kl_weight or self.settings.penalizes_rewards:
            return torch.zeros_like(logps)
        assert reference_logps is not None
        return divergences(logps, reference_logps, self.settings.kl_estimator)

    def _weighted(self, divergence: Tensor, ratios: Tensor) -> Tensor:
        """Divergences times the probability ratios, of tokens or answers, which estimates that of the present policy.

        The gradient of k2 is that of the divergence without a derivative of the ratio.
        """
        if not self.settings.kl_ratio:
            return divergence
        return divergence * (ratios.detach() if self.settings.kl_estimator == "k2" else ratios)

    def _ratio_sums(self, ratios: Tensor, advantages: Tensor, weights: Tensor) -> dict[str, Tensor]:
        low, high = self.settings.clips
        ratios = ratios.detach()
        return {
            "clip_ratio/low_mean": (weights * ((ratios < 1 - low) & (advantages < 0))).sum(),
            "clip_ratio/high_mean": (weights * ((ratios > 1 + high) & (advantages > 0))).sum(),
            "ratio_mean": (weights * ratios).sum(),
        }

    def _corrections(self, log_ratios: Tensor, tokens: _Tokens) -> Tensor:
        """Ratios of the probabilities in training to those in generation, as constants; [n], 1 without a correction.

        The ratio of the proximal policy (before the first update on an answer) to the behavior policy (that generated
        it) of decoupled PPO (arXiv 2110.00641, 2505.24298); :func:`clipped_losses` has that of the present one to the
        proximal one.
        Truncated importance sampling by token or answer, or the answer's ratio with answers beyond the cap left out, as
        in TRL's ``token_truncate``, ``sequence_truncate`` and ``sequence_mask``.
        """
        cap, correction = self.settings.correction_cap, self.settings.correction
        if correction == "none":
            return torch.ones_like(log_ratios)
        if correction == "token":
            return log_ratios.exp().clamp(max=cap)
        ratios = tokens.sums(log_ratios).exp()
        return tokens.of_answers(ratios.where(ratios <= cap, 0.0) if correction == "mask" else ratios.clamp(max=cap))

    def _keep_peak(self, differences: Tensor, tokens: _Tokens) -> None:
        if not len(differences):
            return
        value, token = differences.nan_to_num(nan=torch.inf).max(0, keepdim=True)
        peak = torch.cat([value, tokens.places.index_select(1, token)[:, 0].double()])
        self._peak = peak if self._peak is None else torch.where(peak[0] > self._peak[0], peak, self._peak)


class _Tokens:
    """The loss tokens of this rank, and the answers of the packed sequence that they belong to."""

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        assert batch.rollout is not None and batch.loss_mask is not None
        self.batch, self.rollout, self.device = batch, batch.rollout, device
        self.advantages = to_device(self.rollout.advantages, device)
        """Float64 [answers]"""
        self.weights = to_device(self.rollout.weights, device)
        """Float64 [answers]"""
        self.number = len(batch.sample_lengths)
        """Answers."""
        lengths = torch.tensor(batch.loss_tokens[: self.number], dtype=torch.float64)
        self.lengths = to_device(lengths.clamp(min=1), device)
        """Loss tokens of each answer, float64 [answers], at least 1."""
        answers = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))
        answers = local_tokens(answers, batch.spans)[batch.loss_mask]
        self._answers = to_device(answers, device)
        ids = torch.tensor([*batch.sample_ids, -1])[answers]
        self.places = to_device(torch.stack([ids, batch.position_ids[batch.loss_mask] + 1]), device)
        """Sample id and position in the sample of each token, int64 [2, n]."""

    def of_sequence(self, values: Tensor | None) -> Tensor | None:
        """Values of the tokens, [n], from those of the packed sequence, [T]."""
        if values is None:
            return None
        assert self.batch.loss_mask is not None
        return to_device(local_tokens(values, self.batch.spans)[self.batch.loss_mask], self.device)

    def of_answers(self, values: Tensor) -> Tensor:
        """The value of each token's answer, [n], of [answers]."""
        return values[self._answers]

    def sums(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each answer on all ranks of context parallelism, float64 [answers]."""
        return sample_sums(values, self.batch)[: self.number]


def _weights(batch: PackedBatch) -> Tensor:
    rollout: RolloutBatch | None = batch.rollout
    assert rollout is not None
    return rollout.weights
