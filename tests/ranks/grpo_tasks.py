"""Task of a rank pool: a run of grpo in the layout of its settings."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from megatron.core.utils import get_attr_wrapped_model

from isthmus.config.load import load_config
from isthmus.data.batching.rollout_batches import GeneratedAnswers, RolloutBatches
from isthmus.engine.generation.schedule import Answer, Decoding
from isthmus.engine.generation.token_recorders import LogpRecorder
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.engine.step import Stepper
from isthmus.errors import Preempted
from isthmus.recipes.build import build_trainer
from isthmus.recipes.model.rank_model import RankModel, build_rank_model
from isthmus.recipes.plan.validation import RunContext, validate
from isthmus.recipes.rollout import vllm_engine
from isthmus.recipes.rollout.advantages import advantages
from isthmus.recipes.rollout.engines import NativeEngine
from isthmus.recipes.rollout.rollout_state import RolloutState
from isthmus.recipes.rollout.vllm_engine import VllmEngine
from isthmus.recipes.rollout.vllm_requests import AnswerRequests
from isthmus.recipes.run import _run_rank
from isthmus.train.reporter import Reporter
from isthmus.train.stop import StopFlag
from ranks.pool_worker import platform


def vowels(completions: list[str], vowel: list[str], **_: Any) -> list[float]:
    """The share of the prompt's vowel in each answer."""
    return [text.count(letter) / max(1, len(text)) for text, letter in zip(completions, vowel, strict=True)]


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for an odd sum of the token ids, else 0: half of the answers."""
    return [float(sum(ids) % 2) for ids in completion_ids]


@contextmanager
def disturbed_generation(layer: int | None) -> Iterator[None]:
    """Generation adds 0.1 to the output of this layer for the second token of each answer."""
    if layer is None:
        yield
        return

    def disturb(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        batch = kwargs["packed_seq_params"]
        if batch.states is None or batch.states.is_prefill:
            return output
        return output + 0.1

    def build(*arguments: Any, **options: Any) -> RankModel:
        model = build_rank_model(*arguments, **options)
        for stage in model.stages:
            decoder = get_attr_wrapped_model(stage, "decoder", return_model_obj=True)
            for block in decoder.decoder.layers:
                if block.layer_number == layer + 1:
                    block.register_forward_hook(disturb, with_kwargs=True)
        return model

    with patch("isthmus.recipes.build.build_rank_model", build):
        yield


def train_with_answers(**arguments: Any) -> dict[str, Any]:
    """The rows of metrics.jsonl, and prompts, answers and advantages of each rollout."""
    rollouts: list[dict[str, Any]] = []

    def record(answers: GeneratedAnswers, *rest: Any) -> RolloutBatches:
        if answers.advantages.any():  # else to compute the log-probabilities of the reference
            advantages = answers.advantages.tolist()
            rollouts.append({"prompts": answers.prompts, "answers": answers.answers, "advantages": advantages})
        return RolloutBatches(answers, *rest)

    with patch("isthmus.recipes.rollout.rollout_maker.RolloutBatches", record):
        rows = train(**arguments)
    return {"rows": rows, "rollouts": rollouts}


def context_of(model: str, data: str, out: str, settings: dict[str, Any]) -> RunContext:
    flags = {
        "model": model,
        "data": [data],
        "out": out,
        "rollout.reward": f"{__file__}:vowels",
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 6,
        "data.seq_length": 64,
        "data.valid_fraction": 0.25,
        "train.steps": 3,
        "train.global_batch_size": 8,
        "optim.lr": 1e-3,
        "checkpoint.export_final": False,
        "logging.progress": "lines",
        "platform": "cpu",
        "train.precision": "fp32",
        "train.threads": 1,
        **settings,
    }
    config = load_config("grpo", None, flags=flags)
    return validate(config, ranks_here=1, machine=platform())


def train(*, model: str, data: str, out: str, settings: dict[str, Any], disturbed_layer: int | None = None) -> Any:
    """The rows of metrics.jsonl."""
    with StopFlag() as stop, disturbed_generation(disturbed_layer):
        _run_rank(context_of(model, data, out, settings), [], stop)
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


@dataclass(slots=True)
class _Beside:
    """Answers of the native engine, as one that generates beside training has them: of the weights at the start."""

    answers: list[Answer]
    ends: bool
    seconds: float = 1.0

    def wait(self, check: Callable[[], None]) -> list[Answer]:
        if not self.ends:
            signal.raise_signal(signal.SIGTERM)
        while not self.ends:
            check()
        return self.answers


def train_beside(*, stops_at: int | None = None, **run: Any) -> Any:
    """As :func:`train`, with an engine that generates beside training.

    The generation ``stops_at`` does not end; a stop request comes when training begins to wait for it.
    """
    generations = 0

    def start(engine: NativeEngine, prompts: Any, numbers: Any, decoding: Decoding) -> _Beside:
        nonlocal generations
        generations += 1
        return _Beside(engine.inference.answers(prompts, decoding, numbers), generations != stops_at)

    with patch.object(NativeEngine, "overlaps_training", True), patch.object(NativeEngine, "start", start):
        try:
            return train(**run)
        except Preempted as error:
            return str(error)


def train_with_offload(**run: Any) -> Any:
    """The rows of metrics.jsonl of a run on a CPU with a setting for GPUs."""
    with patch("isthmus.recipes.plan.validation.check_offload"):
        return train(**run)


def train_with_intervals(**run: Any) -> Any:
    """The rows of metrics.jsonl, and when rank 0 was in each update and each weight transfer, and servers generated."""
    intervals: dict[str, list[list[float]]] = {"updates": [], "transfers": []}
    requests: list[AnswerRequests] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started_s = time.monotonic()
            result = function(*arguments)
            intervals[name].append([started_s, time.monotonic()])
            return result

        return call

    class RecordedRequests(AnswerRequests):
        def __init__(self, *arguments: Any) -> None:
            requests.append(self)
            super().__init__(*arguments)

    with (
        patch.object(Stepper, "train_step", recorded("updates", Stepper.train_step)),
        patch.object(VllmEngine, "_update", recorded("transfers", VllmEngine._update)),
        patch.object(vllm_engine, "AnswerRequests", RecordedRequests),
    ):
        rows = train(**run)
    intervals["generations"] = [[each.started_s, each.started_s + each.seconds] for each in requests]
    return rows, intervals


def one_step_off_policy(*, model: str, data: str, out: str, settings: dict[str, Any]) -> Any:
    """Losses of all steps and token ids of all rollouts, of a loop written by hand."""
    context = context_of(model, data, out, settings)
    config = context.config
    position = open_groups(config.parallel, context.platform, seed=config.train.seed, timeout_s=60)
    with StopFlag() as stop, context.run_dir.locked(), Reporter(Path(out), config.logging, is_main=True) as reporter:
        trainer = build_trainer(context, position, reporter, stop)
        stepper, maker = trainer.stepper, trainer.rollouts.maker
        prompts, inference = trainer.data.train, trainer.rollouts.inference
        group, updates = config.rollout.group_size, config.grpo.updates_per_rollout
        size = updates * config.train.global_batch_size
        decoding = Decoding(config.rollout.max_new_tokens, maker.ends, temperature=1.0, seed=config.rollout.seed)

        def generated(rollout: int) -> GeneratedAnswers:
            numbers = range(rollout * size, (rollout + 1) * size)
            samples = [prompts.prompt(number // group) for number in numbers]
            tokens = [prompts.store[sample][0].tolist() for sample in samples]
            answers = inference.answers(tokens, decoding, numbers)
            rewards = np.array(parity([answer.tokens for answer in answers]))
            return GeneratedAnswers(
                prompts=tokens,
                answers=[answer.tokens for answer in answers],
                advantages=advantages(rewards, group, config.grpo),
                weights=np.ones(size),
                sampling_logps=[np.array(answer.logps) for answer in answers],
            )

        losses, answers, ahead = [], [], generated(0)
        for rollout in range(config.train.steps // updates):
            present, ahead = ahead, generated(rollout + 1)  # with the weights before the updates
            if updates > 1:
                recorder = LogpRecorder(present.store())
                stepper.evaluate(maker.micro_batches(present).eval_batches(), recorder)
                ends = np.cumsum([len(answer) for answer in present.answers])
                old = np.split(recorder.gathered(stepper.device).numpy(), ends[:-1])
                present = replace(present, old_logps=old)
            answers.append(present.answers)
            batches = RolloutBatches(present, 1.0, prompts.settings, prompts.shard)
            losses += [stepper.train_step(batches.step(update)).loss for update in range(updates)]
    return losses, answers


def next_answers(*, checkpoints: list[str]) -> Any:
    """Token ids of the rollout that each checkpoint has for later updates."""
    states = [RolloutState.read(Path(checkpoint)) for checkpoint in checkpoints]
    return [None if state.next_rollout is None else state.next_rollout.answers.answers for state in states]
