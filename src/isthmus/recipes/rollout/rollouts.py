"""The rollouts of a run: generate answers, reward them, and make the micro batches of the updates on them.

Every rank has all answers of a rollout. They depend on the weights, the prompts and ``rollout.seed`` alone: the number
of an answer, counted from the first of the run, selects its random tokens in every layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from isthmus.config.schema import RunConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.rollout_batches import Float64, GeneratedAnswers, PromptBatches, RolloutBatches
from isthmus.data.chat.rollout_records import PROMPT
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.layer_differences import first_difference
from isthmus.engine.generation.schedule import Decoding
from isthmus.engine.generation.token_recorders import LogpRecorder
from isthmus.engine.parallel.process_groups import on_rank_0, sum_over_ranks
from isthmus.engine.step import EvalResult, Stepper, TokenPeak
from isthmus.engine.trace_region import trace_region
from isthmus.errors import DataError, Hang
from isthmus.recipes.rollout.advantages import advantages, has_variance, length_penalties
from isthmus.recipes.rollout.engines import RolloutEngine
from isthmus.recipes.rollout.rewards import Rewards
from isthmus.recipes.rollout.rollout_state import Rollout, RolloutState
from isthmus.recipes.rollout.starting_weights import StartingWeights
from isthmus.train.grace_period import GracePeriod
from isthmus.train.reporter import Reporter

_CHECKED_PASSES = 16
"""Forward passes between the checks of a generation for the time limit and a stop request."""
_MOST_EXPLAINED = 3
"""Differences whose layer is searched for in a process."""
_MOST_SAMPLES = 4
"""Answers of a step in samples.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardedAnswer:
    prompt: Sequence[int]
    tokens: Sequence[int]
    logps: Float64
    """Log-probabilities of the tokens, as computed in generation."""
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


@dataclass(slots=True)
class Rollouts:
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
    inference: Inference | None
    """Of the native engine, to find the layers where generation and training differ."""
    tolerance: float | None
    """Largest difference of log-probabilities in generation and training; None: any."""
    reference: StartingWeights | None
    """None without a KL divergence."""
    total_steps: int
    """Of the run."""
    grace: GracePeriod
    reporter: Reporter
    consumed: int = 0
    """Prompts of the rollouts so far, also those whose answers were dropped."""
    _reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the last rewards reported, on rank 0."""
    _explained: int = 0
    _rollout: Rollout | None = None
    _batches: RolloutBatches | None = field(default=None, repr=False)

    def metrics(self, step: int) -> Mapping[str, float]:
        """Metrics of the rollout whose first update is ``step``, counted from 1; none in its other updates."""
        rollout = self._rollout
        return {} if rollout is None or step != rollout.first_step + 1 else rollout.metrics

    def batches(self, steps: range) -> Generator[Sequence[PackedBatch], None, None]:
        """The micro batches of this rank in each step; generates when all answers were trained on."""
        for step in steps:
            if self._rollout is None or step == self._rollout.first_step + self.config.grpo.updates_per_rollout:
                self._rollout = self._batches = None  # frees their memory first
                self._rollout = self._generate(step)
            if self._batches is None:
                self._batches = self._micro_batches(self._rollout.answers)
            yield self._batches.step(step - self._rollout.first_step)

    def check_logps(self, step: int, peak: TokenPeak | None) -> None:
        """Report the token and the layer where generation and training differ, if they do by more than the tolerance.

        Args:
            step: counted from 1.
            peak: the token of the step with the largest difference of log-probabilities.
        """
        if peak is None or self.tolerance is None or peak.value <= self.tolerance:
            return
        assert self._rollout is not None
        answers, sample = self._rollout.answers, peak.sample
        prompt, answer = answers.prompts[sample], answers.answers[sample]
        place = peak.position - len(prompt)
        text = (
            f"step {step}: the log-probabilities of token {place + 1} of an answer ({self.decode([answer[place]])!r}) "
            f"differ by {peak.value:.3g} between generation and training, more than {self.tolerance:g} "
            "(rollout.logp_tolerance)"
        )
        details: dict[str, Any] = {"difference": peak.value, "answer": sample, "token": place}
        if self.inference is not None and self._explained < _MOST_EXPLAINED:
            self._explained += 1
            tokens = [*prompt, *answer][: peak.position + 1]
            first = first_difference(self.inference, tokens, len(prompt), self.tolerance)
            if first is None:
                text += ". The layers agree, with the weights after the step: the output layer differs"
            else:
                text += (
                    f". The first difference is in layer {first.layer} at token {first.position + 1 - len(prompt)} of "
                    f"the answer, relative {first.difference:.3g}, with the weights after the step"
                )
                details |= {"layer": first.layer, "first_token": first.position - len(prompt)}
        self.reporter.event(step, "logp difference", f"warning: {text}", **details)

    def evaluate(self, step: int, prompts: PromptBatches) -> EvalResult:
        """Mean reward of the most probable answers; the loss is the negated reward."""
        samples = range(len(prompts.store))
        self.engine.update_weights(step)
        answers, _ = self._answer(prompts, samples, samples, step, greedy=True)
        metrics = self._reward_means(answers)
        return EvalResult(-metrics["reward"], metrics)

    def _generate(self, step: int) -> Rollout:
        settings, grpo, started_s = self.config.rollout, self.config.grpo, time.monotonic()
        group = settings.group_size
        groups = grpo.updates_per_rollout * self.config.train.global_batch_size // group
        with trace_region("weights of the rollout engine"):
            self.engine.update_weights(step)
        answers: list[RewardedAnswer] = []
        missing, generated, equal, seconds = groups, 0, 0, np.zeros(2)
        for _ in range(grpo.max_generations if grpo.dynamic_sampling else 1):
            positions = range(self.consumed, self.consumed + missing)
            numbers = range(group * positions.start, group * positions.stop)
            samples = [self.prompts.prompt(position) for position in positions for _ in range(group)]
            new, new_seconds = self._answer(self.prompts, samples, numbers, step)
            self.consumed, generated, seconds = positions.stop, generated + missing, seconds + new_seconds
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
                f"step {step + 1}: after grpo.max_generations={grpo.max_generations} generations, the rewards differ "
                f"in {groups - missing} of {groups} groups. Use prompts of another difficulty, a larger "
                "rollout.group_size or rollout.temperature, or grpo.dynamic_sampling=false."
            )
        if equal == generated:
            text = f"step {step + 1}: the rewards of each group are equal, so they give no gradient"
            self.reporter.event(step, "no variance", text)
        if settings.samples_every is not None and step % settings.samples_every == 0:
            self._report_samples(step, answers)
        result, kl = self._with_advantages(answers)
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
            "rollout_s": time.monotonic() - started_s,
        }
        return Rollout(first_step=step, answers=result, metrics=metrics)

    def _answer(
        self, prompts: PromptBatches, samples: Sequence[int], numbers: Sequence[int], step: int, *, greedy: bool = False
    ) -> tuple[list[RewardedAnswer], Float64]:
        """An answer to each sample of ``prompts`` with its rewards, and the seconds of generation and rewards."""
        settings, started_s = self.config.rollout, time.monotonic()
        token_ids = [prompts.store[sample][0].tolist() for sample in samples]
        decoding = Decoding(settings.max_new_tokens, self.ends, seed=settings.seed)
        if not greedy:
            decoding = replace(decoding, temperature=settings.temperature, top_p=settings.top_p)
        with trace_region("generation"):
            answers = self.engine.generate(token_ids, numbers, decoding, self._checks(step))
        generated_s = time.monotonic()
        columns = [prompts.store.columns(sample) for sample in samples]
        with trace_region("rewards"):
            rewards, logged = self._rewards(columns, [answer.tokens for answer in answers], step)
        has_reward = ~np.isnan(rewards).all(axis=1)  # NaN without a reward, as in TRL
        totals = np.where(has_reward, np.nansum(rewards * settings.weights, axis=1), np.nan)
        result = [
            RewardedAnswer(
                prompt=token_ids[k],
                tokens=answer.tokens,
                logps=np.array(answer.logps),
                columns=columns[k],
                rewards=rewards[k],
                total=float(totals[k]),
                logged={name: values[k] for name, values in logged.items()},
            )
            for k, answer in enumerate(answers)
        ]
        return result, np.array([generated_s - started_s, time.monotonic() - generated_s])

    def _checks(self, step: int) -> Callable[[], None]:
        """To be called after each forward pass of a generation: ends it after a stop request, or the time limit."""
        started_s, passes, limit_s = time.monotonic(), 0, self.config.rollout.timeout_s

        def check() -> None:
            nonlocal passes
            passes += 1
            if passes % _CHECKED_PASSES:
                return
            self.grace.check(step, f"the rollout of step {step + 1}")
            (late,) = sum_over_ranks([float(time.monotonic() - started_s > limit_s)], self.stepper.device)
            if late:
                raise Hang(
                    f"the generation of step {step + 1} takes longer than rollout.timeout_s={limit_s:g}. Raise it, or "
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
        result = GeneratedAnswers(
            prompts=[answer.prompt for answer in answers],
            answers=[answer.tokens for answer in answers],
            advantages=np.zeros(len(totals)),
            weights=np.array([float(self._is_complete(answer) or not grpo.mask_truncated) for answer in answers]),
            sampling_logps=[answer.logps for answer in answers],
        )
        if self.reference is not None:
            with self.reference.loaded():
                result = replace(result, reference_logps=self._logps(result))
        if grpo.updates_per_rollout > 1:
            result = replace(result, old_logps=self._logps(result))
        if grpo.penalizes_rewards and result.reference_logps is not None:
            pairs = zip(result.sampling_logps, result.reference_logps, strict=True)
            divergences = np.array([float(np.sum(logps - reference)) for logps, reference in pairs])
            totals, kl = totals - grpo.kl_weight * divergences, float(divergences.mean())
        return replace(result, advantages=advantages(totals, settings.group_size, grpo)), kl

    def _micro_batches(self, answers: GeneratedAnswers) -> RolloutBatches:
        return RolloutBatches(answers, self.config.rollout.temperature, self.prompts.settings, self.prompts.shard)

    def _logps(self, answers: GeneratedAnswers) -> list[Float64]:
        """Log-probabilities of the tokens of each answer under the present weights, computed as in training."""
        batches = self._micro_batches(answers)
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

    def state(self, done: int) -> RolloutState:
        """What a run that is resumed after ``done`` steps needs."""
        rollout = self._rollout
        if rollout is not None and done == rollout.first_step + self.config.grpo.updates_per_rollout:
            rollout = None  # all updates are done
        return RolloutState(self.consumed, rollout)

    def load(self, checkpoint: Path) -> None:
        """Continue from the state in the folder of a checkpoint."""
        state = RolloutState.read(checkpoint)
        self.consumed, self._rollout = state.consumed, state.rollout


def mean_of(values: Float64) -> float:
    """Mean without NaN; NaN if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
