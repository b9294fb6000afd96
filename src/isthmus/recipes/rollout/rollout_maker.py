"""Rollouts: answers of the policy, their rewards and advantages.

Every rank has all answers of a rollout. They depend on the weights, the prompts and ``rollout.seed`` alone: the number
of an answer, counted from the first of the run, selects its random tokens in every layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from isthmus.config.schema import RunConfig
from isthmus.data.batching.rollout_batches import (
    Float64,
    GeneratedAnswers,
    PromptBatches,
    RolloutBatches,
    RoutedExperts,
)
from isthmus.data.chat.rollout_records import PROMPT
from isthmus.engine.generation.schedule import Decoding
from isthmus.engine.generation.token_recorders import LogpRecorder
from isthmus.engine.parallel.process_groups import on_rank_0, sum_over_ranks
from isthmus.engine.step import EvalResult, Stepper
from isthmus.engine.trace_region import trace_region
from isthmus.errors import DataError, Hang
from isthmus.recipes.rollout.advantages import advantages, has_variance, length_penalties
from isthmus.recipes.rollout.engines import PendingAnswers, RolloutEngine
from isthmus.recipes.rollout.rewards import Rewards
from isthmus.recipes.rollout.rollout_state import Rollout
from isthmus.recipes.rollout.weights_copy import WeightsCopy
from isthmus.train.grace_period import GracePeriod
from isthmus.train.reporter import Reporter

_CHECKED_PASSES = 16
"""Forward passes between the checks of a generation for the time limit and a stop request."""
_MOST_SAMPLES = 4
"""Answers of a step in samples.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardedAnswer:
    prompt: Sequence[int]
    tokens: Sequence[int]
    logps: Float64
    """Log-probabilities of the tokens, as computed in generation."""
    routed_experts: RoutedExperts | None
    """Experts that the engine chose; None: they are not replayed."""
    columns: Mapping[str, Any]
    """Fields of the record of the prompt."""
    rewards: Float64
    """[rewards], NaN where a reward does not apply."""
    total: float
    """Weighted sum of the rewards; NaN without any."""
    logged: Mapping[str, Any]
    """What reward functions want to see beside it, on rank 0."""

    @property
    def prompt_text(self) -> str:
        """The prompt, or its last message."""
        prompt = self.columns[PROMPT]
        return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


@dataclass(frozen=True, slots=True)
class _Request:
    prompts: Sequence[Sequence[int]]
    """Token ids, once for each answer."""
    columns: Sequence[Mapping[str, Any]]
    """Fields of the records of the prompts."""
    answers: PendingAnswers


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRollout:
    """A rollout whose answers are being generated."""

    step: int
    """Steps done by the weights that generate."""
    first_step: int
    """Steps done before the first update on it."""
    position: int
    """Position of its first prompt in the order of training."""
    request: _Request
    start_s: float
    """Time until the engine had weights and prompts."""


@dataclass(slots=True)
class RolloutMaker:
    """Methods are collectives."""

    config: RunConfig
    prompts: PromptBatches
    stepper: Stepper
    engine: RolloutEngine
    rewards: Rewards | None
    """On rank 0."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    decode: Callable[[Sequence[int]], str]
    reference: WeightsCopy | None
    """Starting weights; None without a KL divergence."""
    total_steps: int
    """Of the run."""
    grace: GracePeriod
    reporter: Reporter
    consumed: int = 0
    """Prompts of the rollouts so far, also those whose answers were dropped."""
    _reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the last rewards reported, on rank 0."""

    def start(self, step: int, first_step: int) -> PendingRollout:
        """Begin to generate with the weights after ``step`` what is trained on after ``first_step``."""
        started_s, position = time.monotonic(), self.consumed
        with trace_region("weights of the rollout engine"):
            self.engine.update_weights(step)
        request = self._next_prompts(self._groups)
        return PendingRollout(
            step=step,
            first_step=first_step,
            position=position,
            request=request,
            start_s=time.monotonic() - started_s,
        )

    def complete(self, pending: PendingRollout, done: int, policy: WeightsCopy | None = None) -> Rollout:
        """Wait for the answers, and generate further ones for ``grpo.dynamic_sampling``.

        Args:
            done: steps of the state that is saved if a stop request ends the generation (Abandoned).
            policy: the weights that generate, if the present ones are others.
        """
        settings, grpo, started_s = self.config.rollout, self.config.grpo, time.monotonic()
        group, groups, check = settings.group_size, self._groups, self._checks(pending, done)
        answers: list[RewardedAnswer] = []
        request, missing, generated, equal, seconds = pending.request, groups, 0, 0, np.zeros(2)
        for generation in range(grpo.max_generations if grpo.dynamic_sampling else 1):
            if generation:
                request = self._next_prompts(missing)
            new, new_seconds = self._answer(request, check, pending.step)
            generated, seconds = generated + missing, seconds + new_seconds
            differ = has_variance(np.array([answer.total for answer in new]), group)
            equal += int(np.count_nonzero(~differ))
            if not grpo.dynamic_sampling:
                answers = new
                break
            answers += [answer for answer, used in zip(new, np.repeat(differ, group), strict=True) if used]
            missing = groups - len(answers) // group
            if not missing:
                break
        else:
            raise DataError(
                f"step {pending.first_step + 1}: after grpo.max_generations={grpo.max_generations} generations, the "
                f"rewards differ in {groups - missing} of {groups} groups. Use prompts of another difficulty, a larger "
                "rollout.group_size or rollout.temperature, or grpo.dynamic_sampling=false."
            )
        if equal == generated:
            text = f"step {pending.first_step + 1}: the rewards of each group are equal, so they give no gradient"
            self.reporter.event(pending.step, "no variance", text)
        if settings.samples_every is not None and pending.step % settings.samples_every == 0:
            self._report_samples(pending.step, answers)
        result, kl = self._with_advantages(answers)
        if pending.first_step > pending.step:
            with nullcontext() if policy is None else policy.loaded():
                result = replace(result, policy_logps=self._logps(result))
        tokens = np.array([len(answer.tokens) for answer in answers])
        metrics = {
            **self._reward_means(answers),
            **({} if kl is None else {"rollout_kl": kl}),
            "reward_std": float(np.nanstd([answer.total for answer in answers])),
            "answer_tokens": float(tokens.mean()),
            "answer_tokens_max": float(tokens.max()),
            "truncated": float(np.mean([not self._is_complete(answer) for answer in answers])),
            "groups_without_variance": equal / generated,
            "generated_tokens_per_s": float(tokens.sum() / seconds[0]),
            "generation_s": float(seconds[0]),
            "reward_s": float(seconds[1]),
            **self._reward_metrics,
            "rollout_s": pending.start_s + time.monotonic() - started_s,
        }
        return Rollout(first_step=pending.first_step, answers=result, metrics=metrics)

    def with_old_logps(self, rollout: Rollout) -> Rollout:
        """The rollout with what its updates need of the present weights, if there are several."""
        if self.config.grpo.updates_per_rollout == 1:
            return rollout
        return replace(rollout, answers=replace(rollout.answers, old_logps=self._logps(rollout.answers)))

    def micro_batches(self, answers: GeneratedAnswers) -> RolloutBatches:
        """The micro batches of this rank."""
        return RolloutBatches(answers, self.config.rollout.temperature, self.prompts.settings, self.prompts.shard)

    def evaluate(self, step: int, prompts: PromptBatches) -> EvalResult:
        """Mean reward of the most probable answers; the loss is the negated reward."""
        samples = range(len(prompts.store))
        self.engine.update_weights(step)
        pending = PendingRollout(
            step=step,
            first_step=step,
            position=0,
            request=self._request(prompts, samples, samples, greedy=True),
            start_s=0.0,
        )
        answers, _ = self._answer(pending.request, self._checks(pending, step), step)
        metrics = self._reward_means(answers)
        return EvalResult(-metrics["reward"], metrics)

    @property
    def _groups(self) -> int:
        """Groups of a rollout."""
        updates, size = self.config.grpo.updates_per_rollout, self.config.train.global_batch_size
        return updates * size // self.config.rollout.group_size

    def _next_prompts(self, groups: int) -> _Request:
        """A request for groups of answers to the next prompts."""
        group, positions = self.config.rollout.group_size, range(self.consumed, self.consumed + groups)
        self.consumed = positions.stop
        samples = [self.prompts.prompt(position) for position in positions for _ in range(group)]
        return self._request(self.prompts, samples, range(group * positions.start, group * positions.stop))

    def _request(
        self, prompts: PromptBatches, samples: Sequence[int], numbers: Sequence[int], *, greedy: bool = False
    ) -> _Request:
        """A request for an answer to each sample of ``prompts``."""
        settings = self.config.rollout
        token_ids = [prompts.store[sample][0].tolist() for sample in samples]
        decoding = Decoding(settings.max_new_tokens, self.ends, seed=settings.seed)
        if not greedy:
            decoding = replace(decoding, temperature=settings.temperature, top_p=settings.top_p)
        columns = [prompts.store.columns(sample) for sample in samples]
        return _Request(token_ids, columns, self.engine.start(token_ids, numbers, decoding))

    def _answer(self, request: _Request, check: Callable[[], None], step: int) -> tuple[list[RewardedAnswer], Float64]:
        """The answers with their rewards, and the seconds of generation and rewards."""
        with trace_region("generation"):
            answers = request.answers.wait(check)
        generated_s = time.monotonic()
        with trace_region("rewards"):
            rewards, logged = self._rewards(request.columns, [answer.tokens for answer in answers], step)
        has_reward = ~np.isnan(rewards).all(axis=1)  # NaN without a reward, as in TRL
        totals = np.where(has_reward, np.nansum(rewards * self.config.rollout.weights, axis=1), np.nan)
        result = [
            RewardedAnswer(
                prompt=request.prompts[k],
                tokens=answer.tokens,
                logps=np.array(answer.logps),
                routed_experts=answer.routed_experts,
                columns=request.columns[k],
                rewards=rewards[k],
                total=float(totals[k]),
                logged={name: values[k] for name, values in logged.items()},
            )
            for k, answer in enumerate(answers)
        ]
        return result, np.array([request.answers.seconds, time.monotonic() - generated_s])

    def _checks(self, pending: PendingRollout, done: int) -> Callable[[], None]:
        """To be called after each forward pass of a generation: ends it at the time limit, or after a stop request.

        The state after ``done`` steps is then saved.
        """
        started_s, passes, limit_s = time.monotonic(), 0, self.config.rollout.timeout_s
        step = pending.first_step + 1

        def check() -> None:
            nonlocal passes
            passes += 1
            if passes % _CHECKED_PASSES:
                return
            self.grace.check(done, f"the rollout of step {step}")
            (late,) = sum_over_ranks([float(time.monotonic() - started_s > limit_s)], self.stepper.device)
            if late:
                raise Hang(
                    f"the generation of step {step} takes longer than rollout.timeout_s={limit_s:g}. Raise it, or "
                    "lower rollout.max_new_tokens, rollout.group_size or train.global_batch_size."
                )

        return check

    def _rewards(
        self, records: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[int]], step: int
    ) -> tuple[Float64, Mapping[str, Sequence[Any]]]:
        """[answers, rewards], and on rank 0, which computes them, the columns that functions log."""
        logged: dict[str, Sequence[Any]] = {}
        values = torch.zeros(len(answers), len(self.config.rollout.reward), dtype=torch.float64)

        def compute() -> None:
            assert self.rewards is not None
            texts = [self.decode(answer) for answer in answers]
            table = self.rewards.compute(records, texts, answers, step=step, total_steps=self.total_steps)
            values.copy_(torch.from_numpy(table.values))
            self._reward_metrics = table.metrics
            logged.update(table.columns)
            if table.warning is not None:
                self.reporter.log(f"warning: step {step + 1}: {table.warning}")

        on_rank_0(compute, "rewards")
        values = values.to(self.stepper.device)
        dist.broadcast(values, src=0)
        return values.cpu().numpy(), logged

    def _reward_means(self, answers: Sequence[RewardedAnswer]) -> dict[str, float]:
        names, rewards = self.config.rollout.reward_names, np.array([answer.rewards for answer in answers])
        parts = {f"reward/{name}": mean_of(values) for name, values in zip(names, rewards.T, strict=True)}
        total = mean_of(np.array([answer.total for answer in answers]))
        return {"reward": total, **(parts if len(parts) > 1 else {})}

    def _is_complete(self, answer: RewardedAnswer) -> bool:
        return answer.tokens[-1] in self.ends

    def _with_advantages(self, answers: Sequence[RewardedAnswer]) -> tuple[GeneratedAnswers, float | None]:
        """What the loss needs, and the mean KL divergence of an answer from the reference, if it is a penalty."""
        settings, grpo, kl = self.config.rollout, self.config.grpo, None
        totals = np.array([answer.total for answer in answers])
        lengths = np.array([len(answer.tokens) for answer in answers])
        totals += length_penalties(lengths, settings.max_new_tokens, grpo.length_penalty_tokens)
        routed = [answer.routed_experts for answer in answers if answer.routed_experts is not None]
        result = GeneratedAnswers(
            prompts=[answer.prompt for answer in answers],
            answers=[answer.tokens for answer in answers],
            advantages=np.zeros(len(totals)),
            weights=np.array([float(self._is_complete(answer) or not grpo.mask_truncated) for answer in answers]),
            sampling_logps=[answer.logps for answer in answers],
            routed_experts=routed if len(routed) == len(answers) else None,
        )
        if self.reference is not None:
            with self.reference.loaded():  # whose routers choose, as in other programs: its weights have not generated
                result = replace(result, reference_logps=self._logps(replace(result, routed_experts=None)))
        if grpo.penalizes_rewards and result.reference_logps is not None:
            pairs = zip(result.sampling_logps, result.reference_logps, strict=True)
            divergences = np.array([float(np.sum(logps - reference)) for logps, reference in pairs])
            totals, kl = totals - grpo.kl_weight * divergences, float(divergences.mean())
        return replace(result, advantages=advantages(totals, settings.group_size, grpo)), kl

    def _logps(self, answers: GeneratedAnswers) -> list[Float64]:
        """Log-probabilities of the tokens of each answer under the present weights, computed as in training."""
        batches = self.micro_batches(answers)
        recorder = LogpRecorder(batches.store)
        self.stepper.evaluate(batches.eval_batches(), recorder)
        ends = np.cumsum([len(answer) for answer in answers.answers])
        return np.split(recorder.gathered(self.stepper.device).numpy(), ends[:-1])

    def _report_samples(self, step: int, answers: Sequence[RewardedAnswer]) -> None:
        names = self.config.rollout.reward_names
        rows = [
            {
                "prompt": answer.prompt_text,
                "completion": self.decode(answer.tokens),
                "reward": answer.total,
                "rewards": dict(zip(names, answer.rewards.tolist(), strict=True)),
                **answer.logged,
            }
            for answer in answers[:: self.config.rollout.group_size][:_MOST_SAMPLES]
        ]
        self.reporter.rollout_samples(step, rows)


def mean_of(values: Float64) -> float:
    """Mean without NaN; NaN if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
