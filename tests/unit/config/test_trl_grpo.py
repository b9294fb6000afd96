"""Configs of TRL's GRPO and RLOO become rollouts, rewards and losses of ``isthmus grpo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config.dialects.trainers.translate_trainer import translate_trainer
from isthmus.config.dialects.translation import Translation
from isthmus.config.load import load_config
from unit.config.test_trainers import refusals, translated

SMALLEST = {"model_name_or_path": "m", "dataset_name": "d.json", "reward_funcs": ["my.rewards.f"]}


def grpo(folder: Path, **keys: Any) -> dict[str, Any]:
    return dict(translated("TRL", {**SMALLEST, "num_generations": 8, **keys}, folder).settings)


def refused(folder: Path, **keys: Any) -> str:
    (line,) = refusals("TRL", {**SMALLEST, "num_generations": 8, **keys}, folder)[1:] or [""]
    return line


def test_defaults_of_trl(tmp_path: Path) -> None:
    translation = translated("TRL", {**SMALLEST, "num_generations": 8}, tmp_path)
    assert translation.recipe == "grpo"
    expected = {
        "rollout.reward": ["my.rewards:f"],
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 512,
        "grpo.loss": "dapo",
        "grpo.clip_low": 0.2,
        "grpo.clip_high": 0.2,
        "grpo.kl_weight": 0.0,
        "grpo.scale_advantages": "group",
        "grpo.updates_per_rollout": 1,
        "optim.lr": 1e-6,
        "train.global_batch_size": 8,
        "train.recompute": "full",
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert not {"data.packing", "data.overlong", "data.loss_on"} & translation.settings.keys()


def test_settings_of_a_config(tmp_path: Path) -> None:
    keys = {
        "reward_model_name_or_path": "me/reward",
        "reward_funcs": ["accuracy_reward", "think_format_reward", "my.rewards.f"],
        "reward_weights": [1.0, 1.0, 0.5, 0.1],
        "num_generations": 4,
        "max_completion_length": 1024,
        "max_prompt_length": 512,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 0,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 8,
        "loss_type": "dr_grpo",
        "epsilon": 0.1,
        "epsilon_high": 0.28,
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "scale_rewards": False,
        "mask_truncated_completions": True,
        "entropy_coef": 0.01,
        "log_completions": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
    }
    settings = grpo(tmp_path, **keys)
    expected = {
        "rollout.reward": [
            "me/reward",
            "math_verify:solution",
            "format:<think>(?!.*<think>).*?</think>.*",
            "my.rewards:f",
        ],
        "rollout.reward_weights": [1.0, 1.0, 0.5, 0.1],
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 1024,
        "data.seq_length": 1536,
        "rollout.temperature": 0.9,
        "rollout.top_p": 0.95,
        "train.micro_batch_size": 4,
        "train.global_batch_size": 8,
        "grpo.updates_per_rollout": 4,
        "grpo.loss": "dr_grpo",
        "grpo.clip_low": 0.1,
        "grpo.clip_high": 0.28,
        "grpo.kl_weight": 0.04,
        "grpo.kl_ratio": False,
        "grpo.scale_advantages": "none",
        "grpo.mask_truncated": True,
        "grpo.entropy_weight": 0.01,
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert "rollout.engine" not in settings


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"grpo.loss": "gspo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"grpo.loss": "cispo", "grpo.clip_high": 4.0}),
        ({"scale_rewards": "batch"}, {"grpo.scale_advantages": "batch"}),
        ({"scale_rewards": True}, {"grpo.scale_advantages": "group"}),
        ({"generation_batch_size": 64}, {"grpo.updates_per_rollout": 8}),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 4}, {"grpo.updates_per_rollout": 1}),
        (
            {"reward_funcs": ["get_soft_overlong_punishment", "a.f"], "max_completion_length": 1280},
            {"rollout.reward": ["a:f"], "grpo.length_penalty_tokens": 256},
        ),
    ],
)
def test_one_choice(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    settings = grpo(tmp_path, **keys)
    assert {name: settings.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rollout.url": ["http://0.0.0.0:8000"], "grpo.correction": "mask", "grpo.correction_cap": 3.0}),
        ({"vllm_server_host": "a", "vllm_server_port": 9}, {"rollout.url": ["http://a:9"]}),
        ({"vllm_server_base_url": "http://b"}, {"rollout.url": ["http://b"]}),
        ({"vllm_importance_sampling_correction": False}, {"grpo.correction": "none"}),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
            {"grpo.correction": "token", "grpo.correction_cap": 2.0},
        ),
    ],
)
def test_a_server_of_vllm(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    settings = grpo(tmp_path, use_vllm=True, vllm_mode="server", **keys)
    expected = {"rollout.engine": "vllm", **expected}
    assert {name: settings.get(name) for name in expected} == expected


def test_rloo(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("{model_name_or_path: m, dataset_name: d.json, reward_funcs: [a.f], normalize_advantages: false}")
    for translation in (translate_trainer("TRL", file, recipe="rloo"), translate_trainer("TRL", file)):
        expected = {"grpo.loss": "rloo", "grpo.kl_weight": 0.05, "rollout.group_size": 2, "grpo.clip_high": 0.2}
        assert {name: translation.settings.get(name) for name in expected} == expected
        assert "grpo.scale_advantages" not in translation.settings
        check(translation)


@pytest.mark.parametrize("command", ["trl grpo", "python examples/scripts/grpo.py", "trl rloo"])
def test_the_command_of_a_script(command: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"{command} --model_name_or_path m --dataset_name d.json --reward_funcs a.f b.g\n")
    translation = translate_trainer("TRL", file)
    assert translation.recipe == "grpo" and translation.settings["rollout.reward"] == ["a:f", "b:g"]
    assert translation.settings["grpo.loss"] == ("rloo" if "rloo" in command else "dapo")
    check(translation)


def check(translation: Translation) -> None:
    load_config(None, None, [], {"recipe": translation.recipe, **translation.settings}, translation.origins)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"loss_type": "sapo"}, "loss_type: sapo  is not a loss of grpo; use one of grpo, bnpo"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level: sequence  is for loss_type: grpo"),
        ({"loss_type": "cispo"}, "epsilon_high  must be the largest ratio of cispo"),
        ({"num_iterations": 2}, "num_iterations: 2  an answer is trained on once"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation: 3  has no whole number"),
        ({"generation_batch_size": 12}, "generation_batch_size: 12  is not a multiple of 8 answers"),
        ({"top_k": 50}, "top_k: 50  tokens are drawn by"),
        ({"min_p": 0.1}, "min_p: 0.1  tokens are drawn by"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: 1.1  tokens are drawn by"),
        ({"delta": 4.0}, "delta: 4.0  ratios are clipped on one side"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile: 0.2  all tokens have loss"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy: true  grpo.entropy_weight is constant"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation: normalize_then_sum  "),
        ({"reward_funcs": ["accuracy"]}, "has accuracy, which is not a reward of TRL's scripts or MODULE.FUNCTION"),
        ({"reward_funcs": ["get_soft_overlong_punishment"]}, "which is for answers of 1280 tokens"),
        ({"normalize_advantages": True}, "normalize_advantages: true  advantages and rewards of rloo"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_mode": "token_mask"},
            "vllm_importance_sampling_mode: token_mask  is not a correction of Isthmus",
        ),
    ],
)
def test_what_is_refused(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert why in refused(tmp_path, **keys)


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "num_iterations": 1,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "top_entropy_quantile": 1.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "use_adaptive_entropy": False,
        "use_bias_correction_kl": True,
        "importance_sampling_level": "token",
    }
    assert grpo(tmp_path, **neutral)["grpo.loss"] == "dapo"


def test_the_ratio_of_a_divergence_without_weight_is_left_out(tmp_path: Path) -> None:
    settings = grpo(tmp_path, beta=0.0, use_bias_correction_kl=False)
    assert settings["grpo.kl_weight"] == 0 and "grpo.kl_ratio" not in settings
