"""Reinforcement learning: how answers are generated and rewarded, and the loss on them."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.config.schema.section import Count, Interval, Seconds, Section, Seed, listed, refuse

_CLIPS: dict[str, tuple[float, float]] = {
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "dapo": (0.2, 0.28),
}
"""Defaults of ``clip_low`` and ``clip_high``; the others have 0.2 for both."""


SHIPPED_REWARDS = ("exact_match", "format", "math_verify")
"""Rewards of Isthmus; a colon after them begins their argument."""


class RolloutConfig(Section):
    """Generation of answers by the model that is trained, and their rewards."""

    engine: Literal["native", "vllm"] = "native"
    """What generates: the training processes themselves (native), or vLLM servers (vllm)."""
    url: Annotated[tuple[str, ...], BeforeValidator(listed), Field(strict=False)] = ()
    """vllm: addresses of running servers, such as http://host:8000; none: a server is started on this machine."""
    transfer: Literal["auto", "files", "group"] = "auto"
    """vllm: how the servers of url get weights: as safetensors files, or in buckets through a process group with their
    workers (NCCL on GPUs, gloo on CPUs). auto: group on GPUs if all servers join it and get more than an adapter."""
    reward: Annotated[tuple[str, ...], BeforeValidator(listed), Field(strict=False)] = ()
    """Rewards, whose weighted sum counts: FILE.py:FUNCTION with TRL's signature, exact_match, format:EXPRESSION,
    math_verify, or the folder or Hub id of a reward model."""
    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Weight of each reward; none: all 1."""
    group_size: Annotated[int, Field(ge=2, le=2**16)] = 8
    """Answers to each prompt."""
    max_new_tokens: Count = 256
    """Most tokens of an answer."""
    batch_size: Count = 64
    """native: answers that a data-parallel rank generates at the same time; their states are in memory together."""
    temperature: float = Field(default=1.0, gt=0)
    """The logits are divided by it, in generation and in the loss."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Tokens are drawn from the most probable ones that have this probability together."""
    router_replay: bool | Literal["auto"] = "auto"
    """vllm, models with experts: training computes each token with the experts that the server chose for it (rollout
    routing replay, arXiv 2510.11370). auto: if the servers of url return them (--enable-return-routed-experts)."""
    seed: Seed = 0
    """Seed of the random tokens."""
    ahead: Literal[0, 1] = 0
    """Rollouts between generation and training: 0: answers are of the present weights; 1: the next rollout is generated
    with the weights before the updates on the present one, by vllm at the same time (one step off policy). 1 needs
    grpo.correction."""
    offload: bool = False
    """native, on GPUs: gradients and optimizer state leave the GPU while answers are generated: the state is copied to
    host memory and back."""
    timeout_s: Seconds = 1800.0
    """Longest time of a generation, of the rewards of a step, and of a weight transfer."""
    logp_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference between the log-probabilities of a token in generation and in training; above it the first
    token and layer that differ are named. null: 1e-4 in float32 with engine=native, else no limit."""
    samples_every: Interval = 10
    """Steps between samples of answers with their rewards, in samples.jsonl and in the report; null or 0: none."""

    @model_validator(mode="after")
    def _weights_fit(self) -> RolloutConfig:
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            refuse(
                "reward_weights",
                f"got {len(self.reward_weights)} reward_weights for {len(self.reward)} rewards; give one for each",
            )
        if self.url and self.engine != "vllm":
            refuse("url", f"url is for engine=vllm, got {self.engine}; leave it out")
        if self.transfer == "group" and not self.url:
            refuse(
                "transfer",
                "transfer=group is for running servers, and there is no url; a server that the run starts reads files: "
                "give url, or leave transfer out",
            )
        if self.engine == "native" and self.router_replay is True:
            refuse(
                "router_replay",
                "router_replay=true is for engine=vllm, got native, which chooses experts with the weights and code of "
                "training; leave it out",
            )
        if self.engine != "native" and self.offload:
            refuse(
                "offload",
                f"offload=true makes room for generation by the training processes, got engine={self.engine}, whose "
                "memory does not change; leave it out",
            )
        if self.engine != "native" and self.batch_size != type(self).model_fields["batch_size"].default:
            refuse("batch_size", f"batch_size={self.batch_size} is for engine=native, got {self.engine}; leave it out")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """``reward_weights``, also if they are not given."""
        return self.reward_weights or (1.0,) * len(self.reward)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Short names of the rewards, for metrics: of a function, of a folder, or of a reward of Isthmus.

        Of several with the same name, all but the first have a number.
        """
        names: list[str] = []
        for text in self.reward:
            shipped, _, function = text.partition(":")
            named = function.rpartition(":")[2] or os.path.basename(text.rstrip("/"))
            name = shipped if shipped in SHIPPED_REWARDS else named
            numbered = (name, *(f"{name}-{number}" for number in range(2, len(self.reward) + 1)))
            names.append(next(one for one in numbered if one not in names))
        return tuple(names)


class GrpoConfig(Section):
    """Group relative policy optimization (arXiv 2402.03300) and its relatives."""

    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "reinforce_pp"] = "dapo"
    """grpo: mean over answers of the mean over their tokens; dapo (arXiv 2503.14476) and bnpo: mean over all tokens of
    the step; dr_grpo (arXiv 2503.20783): sum over tokens, divided by max_new_tokens; gspo (arXiv 2507.18071): one
    ratio an answer; cispo (arXiv 2506.13585): clipped ratios as weights; rloo (arXiv 2402.14740): leave-one-out
    baseline, one ratio an answer; reinforce_pp (arXiv 2501.03262, "w/ baseline"): as bnpo, with advantages normalized
    over the step."""
    clip_low: float | None = Field(default=None, ge=0)
    """Probability ratios below 1 - clip_low are clipped; null: 0.2, gspo 3e-4, cispo 1 (no limit)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Probability ratios above 1 + clip_high are clipped; null: 0.2, dapo 0.28, gspo 4e-4, cispo 4 (TRL's epsilon_high
    is 1 + clip_high for cispo)."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy, the starting weights; 0: no reference. rloo subtracts it
    from the reward of an answer, summed over tokens, with k1; the others add it to the loss of a token."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence of a token (J. Schulman, 2020): log ratio, half its square, or the unbiased k3."""
    kl_ratio: bool = True
    """Multiply the divergence of a token by its probability ratio, for an unbiased gradient (arXiv 2512.02556, section
    3.1); false: as in the paper of GRPO. k1 has a gradient of zero on average without it."""
    updates_per_rollout: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimizer steps for the answers of a rollout, each on the next train.global_batch_size of them."""
    scale_advantages: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the rewards of their group, or of the step; null: as the loss
    defines it: group; none for dr_grpo and rloo; batch for reinforce_pp."""
    mask_truncated: bool = False
    """Leave answers without an end token out of the loss."""
    length_penalty_tokens: Annotated[int, Field(ge=0)] = 0
    """Answers within so many tokens of rollout.max_new_tokens lose reward, linearly up to 1 (equation 13 of DAPO)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by those of further prompts, as DAPO does."""
    max_generations: Count = 10
    """dynamic_sampling: most generations for a rollout."""
    entropy_weight: float = 0.0
    """Weight of the mean entropy of the tokens' distributions, a bonus."""
    correction: Literal["none", "token", "sequence", "mask"] = "none"
    """Correction of the loss where the probabilities in generation differ from those in training before the first
    update on an answer: multiply it by the ratio of each token, or of the answer, at most correction_cap; mask: by that
    of the answer, or 0 if it is above."""
    correction_cap: float = Field(default=3.0, gt=1)
    """Largest ratio of a correction."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> GrpoConfig:
        has_divergence = self.kl_weight > 0 and not self.penalizes_rewards
        divergence = "kl_weight above 0, and another loss than rloo"
        for name, has_effect, needed in (
            ("max_generations", self.dynamic_sampling, "dynamic_sampling=true"),
            ("correction_cap", self.correction != "none", "a correction"),
            ("kl_estimator", has_divergence, divergence),
            ("kl_ratio", has_divergence, divergence),
        ):
            if not has_effect and (value := getattr(self, name)) != type(self).model_fields[name].default:
                refuse(name, f"{name}={value} needs {needed}; set it, or leave {name} out")
        return self

    @property
    def clips(self) -> tuple[float, float]:
        """``clip_low`` and ``clip_high`` with the defaults of the loss."""
        low, high = _CLIPS.get(self.loss, (0.2, 0.2))
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def averages_answers(self) -> bool:
        """Whether the loss is a mean over answers, else over tokens."""
        return self.loss in ("grpo", "dr_grpo", "gspo", "rloo")

    @property
    def has_answer_ratios(self) -> bool:
        """Whether an answer has a probability ratio, else each token."""
        return self.loss in ("gspo", "rloo")

    @property
    def penalizes_rewards(self) -> bool:
        """Whether the KL divergence of an answer is subtracted from its reward, and is not a part of the loss."""
        return self.loss == "rloo"

    @property
    def advantage_scale(self) -> Literal["group", "batch", "none"]:
        """``scale_advantages`` with the default of the loss."""
        if self.scale_advantages is not None:
            return self.scale_advantages
        if self.loss in ("dr_grpo", "rloo"):
            return "none"
        return "batch" if self.loss == "reinforce_pp" else "group"
