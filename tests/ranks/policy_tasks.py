"""Task of a rank pool: steps of the policy loss on fixed answers, whose log-probabilities are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from isthmus.config.schema.grpo import GrpoConfig, RolloutConfig
from isthmus.convert.gathered_weights import full_weights
from isthmus.data.batching.batches import BatchSettings, BatchShard
from isthmus.data.batching.rollout_batches import Float64, GeneratedAnswers, RolloutBatches, RoutedExperts
from isthmus.engine.loss.policy_loss import PolicyObjective
from isthmus.engine.parallel.live_parameters import live_parameters
from ranks.tasks import Training, start
from ranks.tiny import SEQ_LENGTH, VOCAB

BATCH, STEPS = 8, 10
MAX_NEW_TOKENS = 16
LOGP = -np.log(VOCAB)
"""Log-probability of a token in the tiny models, about."""


def fixed_answers(
    *, seed: int = 0, steps: int = STEPS, has_weights: bool = False, experts: tuple[int, int, int] | None = None
) -> GeneratedAnswers:
    """Answers of 1 to 14 tokens to prompts of 1 to 8 tokens, for several steps.

    ``experts``: layers, experts, and experts per token, of which random ones are replayed.
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 15, BATCH * steps)
    tokens = [random.integers(0, VOCAB, n).tolist() for n in (*random.integers(1, 9, len(lengths)), *lengths)]

    def logps(spread: float) -> list[Float64]:
        return [LOGP + spread * random.standard_normal(n) for n in lengths]

    def routed(layers: int, experts: int, top_k: int) -> list[RoutedExperts]:
        sizes = [len(tokens[k]) + len(tokens[len(lengths) + k]) - 1 for k in range(len(lengths))]
        orders = [random.random((size, layers, experts)).argsort(axis=-1) for size in sizes]
        return [order[..., :top_k].astype(np.uint8) for order in orders]

    old = logps(0.2)
    return GeneratedAnswers(
        prompts=tokens[: len(lengths)],
        answers=tokens[len(lengths) :],
        advantages=random.standard_normal(len(lengths)),
        weights=(random.random(len(lengths)) < 0.8).astype(np.float64) if has_weights else np.ones(len(lengths)),
        sampling_logps=[values + 0.1 * random.standard_normal(len(values)) for values in old],
        old_logps=old,
        reference_logps=logps(0.3),
        routed_experts=None if experts is None else routed(*experts),
    )


def train_policy(
    *,
    grpo: dict[str, Any],
    temperature: float = 1.0,
    steps: int = STEPS,
    has_weights: bool = False,
    micro_batch_size: int = 4,
    packing: bool = True,
    saved: str | None = None,
    all_clipped: bool = False,
    experts: tuple[int, int, int] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Curves of the steps; ``saved`` gets the gradients of the last one, by Hugging Face's names, on one rank.

    With ``all_clipped`` no ratio has a gradient: advantages are negative, and probabilities much smaller than before.
    """
    training = start(**settings)
    rollout = RolloutConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
    training.stepper.objective = PolicyObjective(GrpoConfig.model_validate(grpo), rollout)
    parallel = training.config.parallel
    shard = BatchShard(
        dp_rank=training.model.position.dp_rank,
        dp_size=parallel.dp(dist.get_world_size()),
        pad_to_multiple_of=parallel.length_multiple,
        micro_batches_multiple_of=parallel.pp if parallel.vpp > 1 else 1,
    )
    sizes = BatchSettings(
        seq_length=SEQ_LENGTH, micro_batch_size=micro_batch_size, global_batch_size=BATCH, packing=packing
    )
    answers = fixed_answers(steps=steps, has_weights=has_weights, experts=experts)
    if all_clipped:
        certain = [np.zeros(len(answer)) for answer in answers.answers]
        answers = replace(answers, advantages=-np.ones(len(certain)), old_logps=certain)
    batches = RolloutBatches(answers, temperature, sizes, shard)
    result: dict[str, Any] = {"loss": [], "grad_norm": [], "lr": [], "metrics": [], "peaks": [], "load": []}
    for step in range(steps):
        if saved is not None and step == steps - 1:
            training.stepper.before_update = lambda _: save_gradients(training, Path(saved))
        done = training.stepper.train_step(batches.step(step))
        assert done.peak is not None
        result["loss"].append(done.loss)
        result["grad_norm"].append(done.grad_norm)
        result["lr"].append(done.lr)
        result["metrics"].append(dict(done.metrics))
        result["load"].append(None if done.load is None else done.load.metrics())
        result["peaks"].append((done.peak.value, done.peak.sample, done.peak.position))
    return result


def save_gradients(training: Training, path: Path) -> None:
    """The gradients of a single rank, before they are clipped."""
    plan, live = training.model.plan, live_parameters(training.model.stages)
    gradients: dict[str, Any] = {name: parameter.main_grad for name, parameter in live.items()}
    weights = full_weights(
        gradients,
        plan.family,
        plan.architecture,
        torch.float32,
        layout=training.model.layout,
        device=torch.device("cpu"),
    )
    save_file(dict(weights), path)
