"""Task of a rank pool: a run of grpo in the layout of its settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.core.utils import get_attr_wrapped_model

from isthmus.config.load import load_config
from isthmus.data.batching.rollout_batches import GeneratedAnswers, RolloutBatches
from isthmus.recipes.model.rank_model import RankModel, build_rank_model
from isthmus.recipes.plan.validation import validate
from isthmus.recipes.run import _run_rank
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

    with patch("isthmus.recipes.rollout.rollouts.RolloutBatches", record):
        rows = train(**arguments)
    return {"rows": rows, "rollouts": rollouts}


def train(*, model: str, data: str, out: str, settings: dict[str, Any], disturbed_layer: int | None = None) -> Any:
    """The rows of metrics.jsonl."""
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
    with StopFlag() as stop, disturbed_generation(disturbed_layer):
        context = validate(config, ranks_here=1, machine=platform())
        _run_rank(context, [], stop)
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
