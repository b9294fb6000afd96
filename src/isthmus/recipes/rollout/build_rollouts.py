"""The rollouts of a run, from its validated settings."""

from __future__ import annotations

import torch

from isthmus.config.schema import RunConfig
from isthmus.data.batching.rollout_batches import PromptBatches
from isthmus.engine.generation.inference import Inference
from isthmus.engine.optim.state_offload import StateOffload
from isthmus.engine.parallel.process_groups import agree
from isthmus.engine.step import Stepper
from isthmus.recipes.data.eval_prompts import end_tokens
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.rollout.engines import NativeEngine, RolloutEngine
from isthmus.recipes.rollout.rewards import Rewards, load_rewards
from isthmus.recipes.rollout.rollout_maker import RolloutMaker
from isthmus.recipes.rollout.rollouts import Rollouts
from isthmus.recipes.rollout.vllm_engine import VllmEngine
from isthmus.recipes.rollout.weights_copy import WeightsCopy
from isthmus.train.grace_period import GracePeriod
from isthmus.train.reporter import Reporter

_FLOAT32_TOLERANCE = 1e-4
"""Of log-probabilities of the native engine, whose kernels add up in another order than those of packed sequences."""


def build_rollouts(
    context: RunContext,
    model: RankModel,
    prompts: PromptBatches,
    steps: int,
    stepper: Stepper,
    grace: GracePeriod,
    reporter: Reporter,
) -> Rollouts:
    """A collective; the present weights become the reference policy.

    ``prompts`` are those of training, ``steps`` the optimizer steps of the run.
    """
    config, plan, tokenizer = context.config, context.plan, context.tokenizer
    rewards: list[Rewards] = []
    agree(lambda: rewards.append(_rewards(config, prompts, stepper.device)) if model.position.rank == 0 else None)
    inference = Inference(
        stepper,
        plan.architecture,
        plan.parallel,
        batch_tokens=config.train.micro_batch_size * config.data.seq_length,
        slots=config.rollout.batch_size,
    )
    is_native, tolerance = config.rollout.engine == "native", config.rollout.logp_tolerance
    engine: RolloutEngine = NativeEngine(inference)
    if not is_native:
        folder = context.run_dir.root
        engine = VllmEngine.build(config, model, tokenizer, inference, folder, reporter.log, stepper.device)
    elif tolerance is None and context.precision == "fp32":
        tolerance = _FLOAT32_TOLERANCE
    maker = RolloutMaker(
        config=config,
        prompts=prompts,
        stepper=stepper,
        engine=engine,
        rewards=rewards[0] if rewards else None,
        ends=frozenset(end_tokens(plan.source, tokenizer)),
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        reference=WeightsCopy(stepper.model) if config.grpo.kl_weight else None,
        total_steps=steps,
        grace=grace,
        reporter=reporter,
    )
    offload = StateOffload(stepper.model, stepper.optimizer) if config.rollout.offload else None
    return Rollouts(maker, inference if is_native else None, tolerance, offload)


def _rewards(config: RunConfig, prompts: PromptBatches, device: torch.device) -> Rewards:
    rewards = load_rewards(config, device)
    rewards.check_columns({name for sample in range(len(prompts.store)) for name in prompts.store.columns(sample)})
    return rewards
