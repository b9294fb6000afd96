"""Policy losses equal TRL's on the same answers, advantages and log-probabilities.

TRL's trainers compute the loss of prepared inputs; losses, gradients and metrics are compared over 10 optimizer steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from isthmus.config.schema.grpo import GrpoConfig
from isthmus.data.batching.rollout_batches import GeneratedAnswers
from optional_packages import trl_with_rollouts
from parity.preference_loss import train_steps
from parity.test_trl import arguments, padded, tokenizer
from ranks import grpo_tasks
from ranks.policy_tasks import BATCH, MAX_NEW_TOKENS, STEPS, fixed_answers
from ranks.rank_pool import RankPool
from ranks.tasks import CLIP_GRAD
from ranks.test_grpo import build_policy
from ranks.tiny import build_model_folder, build_samples

pytestmark = trl_with_rollouts.required

TEMPERATURE = 0.8
METRICS = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
CASES: dict[str, dict[str, Any]] = {
    "grpo-kl": {"loss": "grpo", "kl_weight": 0.3},
    "grpo": {"loss": "grpo"},
    "dr_grpo": {"loss": "dr_grpo"},
    "dr_grpo-kl": {"loss": "dr_grpo", "kl_weight": 0.3},
    "dapo": {"loss": "dapo"},
    "dapo-kl-without-ratio": {"loss": "dapo", "kl_weight": 0.3, "kl_ratio": False},
    "dapo-entropy": {"loss": "dapo", "entropy_weight": 0.2},
    "grpo-entropy": {"loss": "grpo", "entropy_weight": 0.2},
    "bnpo": {"loss": "bnpo"},
    "bnpo-kl": {"loss": "bnpo", "kl_weight": 0.3},
    "cispo": {"loss": "cispo", "clip_high": 0.1},
    "cispo-kl": {"loss": "cispo", "kl_weight": 0.3, "clip_high": 0.1},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "gspo-kl": {"loss": "gspo", "kl_weight": 0.3, "clip_low": 0.05, "clip_high": 0.1},
    "rloo": {"loss": "rloo"},
}


def no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def build_trainer(policy: Any, settings: GrpoConfig, out: Path, *, reward: Any = no_reward) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    low, high = settings.clips
    options: dict[str, Any] = {
        "beta": settings.kl_weight,
        "epsilon": low,
        "epsilon_high": 1 + high if settings.loss == "cispo" else high,
        "temperature": TEMPERATURE,
        "max_completion_length": MAX_NEW_TOKENS,
        "per_device_train_batch_size": BATCH,
        "num_generations": 4,
    }
    trainer_class, config_class = GRPOTrainer, GRPOConfig
    if settings.loss == "rloo":
        trainer_class, config_class = RLOOTrainer, RLOOConfig
    else:
        options |= {
            "loss_type": "grpo" if settings.loss == "gspo" else settings.loss,
            "importance_sampling_level": "sequence" if settings.loss == "gspo" else "token",
            "use_bias_correction_kl": settings.kl_ratio,
            "entropy_coef": settings.entropy_weight,
        }
    trainer = trainer_class(
        model=policy,
        reward_funcs=reward,
        args=arguments(config_class, out, **options),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * BATCH),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs_of(answers: GeneratedAnswers, step: int) -> dict[str, Tensor]:
    """What TRL's trainers make of a batch: prompts padded on the left, answers on the right."""
    rows = slice(step * BATCH, (step + 1) * BATCH)
    prompts = [list(prompt)[::-1] for prompt in answers.prompts[rows]]
    tokens = [list(answer) for answer in answers.answers[rows]]

    def logps(values: Any) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(row).float() for row in values[rows]], batch_first=True
        )

    assert answers.old_logps is not None
    return {
        "prompt_ids": padded(prompts, 0).flip(1),
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], 0).flip(1),
        "completion_ids": padded(tokens, 0),
        "completion_mask": padded([[1] * len(row) for row in tokens], 0),
        "advantages": torch.from_numpy(answers.advantages[rows]).float(),
        "old_per_token_logps": logps(answers.old_logps),
        "old_logps": torch.tensor([float(np.sum(row)) for row in answers.old_logps[rows]]),
        "ref_per_token_logps": logps(answers.reference_logps),
        "num_items_in_batch": torch.tensor(sum(map(len, tokens))),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    return build_model_folder(folder, "qwen3", tie_word_embeddings=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_samples(tmp_path_factory.mktemp("samples") / "store")


@pytest.mark.thorough_cases("bnpo", "cispo-kl", "dr_grpo-kl", "grpo", "gspo-kl")
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_trl(case: str, model: Path, samples: Path, one_rank: RankPool, tmp_path: Path) -> None:
    grpo = CASES[case]
    ours = one_rank.run(
        "ranks.policy_tasks.train_policy",
        model=model,
        samples=samples,
        grpo=grpo,
        temperature=TEMPERATURE,
        saved=tmp_path / "gradients",
    )
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = build_trainer(policy, GrpoConfig.model_validate(grpo), tmp_path / "trl")
    policy.train()
    answers, gradients = fixed_answers(), dict[str, Tensor]()
    for name, parameter in policy.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: gradients.update({name: parameter.grad.clone()})
        )
    theirs = train_steps(policy, lambda step: trainer._compute_loss(policy, inputs_of(answers, step)), lr=ours["lr"])
    assert len(ours["loss"]) == STEPS
    for curve in ("loss", "grad_norm"):
        assert ours[curve] == pytest.approx(theirs[curve], rel=1e-5, abs=1e-6)
    for name in METRICS:
        if values := trainer._metrics["train"][name]:
            assert [metrics[name] for metrics in ours["metrics"]] == pytest.approx(values, rel=1e-5, abs=1e-6)
    tensors = load_file(tmp_path / "gradients")
    assert tensors.keys() == gradients.keys()
    differences = {
        name: float((tensors[name] - grad).abs().max() / grad.abs().max()) for name, grad in gradients.items()
    }
    assert max(differences.values()) < 1e-5, differences


def test_rloo_subtracts_the_divergence_from_rewards_as_trl(one_rank: RankPool, tmp_path: Path) -> None:
    """A run of 4 steps: its answers give the same rewards, advantages, losses and gradients in TRL's trainer."""
    folder, prompts, lr = build_policy(tmp_path / "model", "qwen3", num_hidden_layers=2), tmp_path / "data.jsonl", 1e-3
    prompts.write_text("".join(json.dumps({"prompt": f"Write {n}."}) + "\n" for n in range(8)))
    settings = {
        "grpo.loss": "rloo",
        "grpo.kl_weight": 0.3,
        "rollout.reward": f"{grpo_tasks.__file__}:parity",
        "rollout.max_new_tokens": MAX_NEW_TOKENS,
        "rollout.temperature": TEMPERATURE,
        "data.valid_fraction": 0.0,
        "train.steps": 4,
        "train.global_batch_size": BATCH,
        "optim": {"lr": lr, "schedule": "constant", "warmup_steps": 0, "clip_grad": CLIP_GRAD, "weight_decay": 0.1},
    }
    run = {"model": folder, "data": prompts, "out": tmp_path / "run", "settings": settings}
    ours = one_rank.run("ranks.grpo_tasks.train_with_answers", **run)
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy.get_input_embeddings().padding_idx = None  # else a sampled padding token has no gradient in transformers
    trainer = build_trainer(policy, GrpoConfig(loss="rloo", kl_weight=0.3), tmp_path / "trl", reward=grpo_tasks.parity)
    policy.train()
    advantages: list[list[float]] = []

    def loss_of(step: int) -> Tensor:
        rollout = ours["rollouts"][step]
        trainer._generate = lambda prompts: (rollout["prompts"], rollout["answers"], [""] * BATCH)
        inputs = trainer._generate_and_score_completions([{"prompt": ""}] * BATCH)
        advantages.append(inputs["advantages"].tolist())
        loss: Tensor = trainer._compute_loss(policy, inputs)
        return loss

    theirs, rows = train_steps(policy, loss_of, lr=[lr] * 4), [row for row in ours["rows"] if "loss" in row]
    for step, rollout in enumerate(ours["rollouts"]):
        assert rollout["advantages"] == pytest.approx(advantages[step], rel=1e-5, abs=1e-5)
    assert [row["reward"] for row in rows] == pytest.approx(trainer._metrics["train"]["reward"], rel=1e-6)
    for curve in ("loss", "grad_norm"):
        assert [row[curve] for row in rows] == pytest.approx(theirs[curve], rel=1e-5, abs=1e-6)
    assert rows[-1]["rollout_kl"] > 0.1  # the divergence counts
