"""The keys of TRL's GRPOConfig and RLOOConfig, and of the scripts ``trl grpo`` and ``trl rloo``."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.config.dialects.trainers.trainer_config import TrainerConfig

_REWARDS: Mapping[str, str] = {
    "accuracy_reward": "math_verify:solution",
    "reasoning_accuracy_reward": "math_verify:solution",
    "think_format_reward": "format:<think>(?!.*<think>).*?</think>.*",
}
"""Functions that the scripts know by name; both programs leave out what does not apply."""
_OVERLONG, _OVERLONG_LENGTH, _OVERLONG_TOKENS = "get_soft_overlong_punishment", 1280, 256
"""A function with fixed values in the scripts: the length of an answer, and the tokens before it with a penalty."""
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
_CORRECTIONS: Mapping[str, str] = {"token_truncate": "token", "sequence_truncate": "sequence", "sequence_mask": "mask"}
_PROMPT_TOKENS = 2048
"""Tokens of ``data.seq_length`` for a prompt, which TRL does not limit."""


def put_grpo(keys: TrainerConfig, *, rloo: bool) -> None:
    """Settings of the sections ``rollout`` and ``grpo``; after those of TrainingArguments."""
    _put_rewards(keys)
    _put_generation(keys, group_size=2 if rloo else 8)
    _put_batches(keys)
    _put_engine(keys)
    if rloo:
        _put_rloo(keys)
    else:
        _put_loss(keys)
        _put_entropy(keys)
    kl_weight = keys.number("beta") if keys.has("beta") else 0.05 if rloo else 0.0
    keys.put("grpo.kl_weight", float(kl_weight or 0.0), "beta")
    if keys.flag("mask_truncated_completions"):
        keys.put("grpo.mask_truncated", True, "mask_truncated_completions")


def _put_rewards(keys: TrainerConfig) -> None:
    model = keys.text("reward_model_name_or_path")
    rewards = [] if model is None else [model]
    for name in keys.words("reward_funcs"):
        module, _, function = name.rpartition(".")
        if name in _REWARDS:
            rewards.append(_REWARDS[name])
        elif name == _OVERLONG and keys.integer("max_completion_length") == _OVERLONG_LENGTH:
            keys.put("grpo.length_penalty_tokens", _OVERLONG_TOKENS, "reward_funcs")
        elif name == _OVERLONG:
            answers = f"answers of {_OVERLONG_LENGTH} tokens"
            keys.refuse("reward_funcs", f"has {name}, which is for {answers}; set grpo.length_penalty_tokens instead")
        elif module:
            rewards.append(f"{module}:{function}")
        else:
            keys.refuse("reward_funcs", f"has {name}, which is not a reward of TRL's scripts or MODULE.FUNCTION")
    if rewards:
        keys.put("rollout.reward", rewards, "reward_model_name_or_path", "reward_funcs")
    if weights := keys.numbers("reward_weights"):
        keys.put("rollout.reward_weights", weights, "reward_weights")


def _put_generation(keys: TrainerConfig, *, group_size: int) -> None:
    group = keys.integer("num_generations") if keys.has("num_generations") else group_size
    keys.put("rollout.group_size", group, "num_generations")
    tokens = keys.integer("max_completion_length") or 512
    keys.put("rollout.max_new_tokens", tokens, "max_completion_length")
    prompt = keys.integer("max_prompt_length") if keys.has("max_prompt_length") else _PROMPT_TOKENS
    keys.put("data.seq_length", tokens + (prompt or _PROMPT_TOKENS), "max_prompt_length", "max_completion_length")
    if not keys.has("max_prompt_length"):
        reason = f"TRL has no limit for prompts; data.seq_length has room for {_PROMPT_TOKENS} tokens and the answer."
        keys.translation.remark("max_prompt_length", "different", reason)
    for setting, name in (("temperature", "temperature"), ("top_p", "top_p")):
        if (value := keys.number(name)) is not None:
            keys.put(f"rollout.{setting}", float(value), name)
    for name, neutral in (("top_k", (0, -1)), ("min_p", (0,)), ("repetition_penalty", (1,))):
        if keys.has(name) and keys.number(name) not in neutral:
            keys.refuse(name, "tokens are drawn by rollout.temperature and rollout.top_p alone; remove it")
        elif keys.has(name):
            keys.ignore(name, "It is off.")


def _put_batches(keys: TrainerConfig) -> None:
    """Optimizer steps for the answers of a rollout; the global batch counts answers in both programs."""
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    name = "generation_batch_size" if keys.has("generation_batch_size") else "steps_per_generation"
    batches = keys.integer(name)
    if batches is not None and name == "generation_batch_size":
        forward = keys.translation.settings.get("train.global_batch_size", 1) // accumulation
        batches = batches // forward if batches % forward == 0 else None
        if batches is None:
            keys.refuse(name, f"is not a multiple of {forward} answers, those of a forward pass on all ranks")
            return
    batches = accumulation if batches is None else batches
    if batches % accumulation == 0:
        keys.put("grpo.updates_per_rollout", max(batches // accumulation, 1), name)
    elif accumulation % batches == 0:  # several generations with the same weights are one
        keys.put("grpo.updates_per_rollout", 1, name)
    else:
        keys.refuse(name, f"has no whole number of optimizer steps of {accumulation} batches; use a multiple of it")
    if (keys.integer("num_iterations") or 1) > 1:
        keys.refuse("num_iterations", "an answer is trained on once; grpo.updates_per_rollout divides a larger rollout")
    elif keys.has("num_iterations"):
        keys.ignore("num_iterations", "It is the default.")


def _put_engine(keys: TrainerConfig) -> None:
    server = keys.flag("use_vllm") and (keys.text("vllm_mode") or "colocate") == "server"
    if server:
        address = f"http://{keys.text('vllm_server_host') or '0.0.0.0'}:{keys.integer('vllm_server_port') or 8000}"
        keys.put("rollout.engine", "vllm", "use_vllm", "vllm_mode")
        names = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
        keys.put("rollout.url", [keys.text("vllm_server_base_url") or address], *names)
        _put_correction(keys)
        return
    if keys.flag("use_vllm"):
        keys.different("use_vllm", "The training processes generate, with the weights that they train.")
    keys.ignore_present("The training processes generate.", "vllm_mode")


def _put_correction(keys: TrainerConfig) -> None:
    """How the loss corrects for differences between vLLM and the trainer; TRL does it by default."""
    name, mode = "vllm_importance_sampling_mode", keys.text("vllm_importance_sampling_mode") or "sequence_mask"
    if keys.has("vllm_importance_sampling_correction") and not keys.flag("vllm_importance_sampling_correction"):
        keys.put("grpo.correction", "none", "vllm_importance_sampling_correction")
        return
    if mode not in _CORRECTIONS:
        keys.refuse(name, f"is not a correction of Isthmus; use one of {', '.join(_CORRECTIONS)}")
        return
    keys.put("grpo.correction", _CORRECTIONS[mode], name, "vllm_importance_sampling_correction")
    caps = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    cap = next((name for name in caps if keys.has(name)), caps[0])
    keys.put("grpo.correction_cap", float(keys.number(cap) or 3.0), cap)
    if keys.has("vllm_importance_sampling_clip_min"):
        keys.refuse("vllm_importance_sampling_clip_min", "ratios have no lower limit; remove it")


def _put_loss(keys: TrainerConfig) -> None:
    loss, level = keys.text("loss_type") or "dapo", keys.text("importance_sampling_level") or "token"
    if loss not in _LOSSES:
        keys.refuse("loss_type", f"is not a loss of grpo; use one of {', '.join(_LOSSES)}")
        return
    if level == "sequence" and loss == "grpo":
        loss = "gspo"
    elif level != "token":
        keys.refuse("importance_sampling_level", "is for loss_type: grpo, whose loss is gspo then")
    keys.put("grpo.loss", loss, "loss_type", "importance_sampling_level")
    if loss == "bnpo":
        keys.different("loss_type", "bnpo is the mean over the tokens of a global batch, TRL's of a micro batch.")
    _put_clips(keys, loss)
    scale = {"true": "group", "false": "none"}.get(str(keys.value("scale_rewards")).lower(), keys.text("scale_rewards"))
    keys.put("grpo.scale_advantages", scale or "group", "scale_rewards")
    if not keys.has("use_bias_correction_kl"):
        return
    if not keys.number("beta"):
        keys.ignore("use_bias_correction_kl", "There is no KL divergence.")
    elif keys.flag("use_bias_correction_kl"):
        keys.ignore("use_bias_correction_kl", "It is the default.")
    else:
        keys.put("grpo.kl_ratio", False, "use_bias_correction_kl")


def _put_clips(keys: TrainerConfig, loss: str) -> None:
    low = float(keys.number("epsilon") or 0.2)
    if loss == "cispo":
        high = keys.number("epsilon_high")
        if high is None or high < 1:
            keys.refuse("epsilon_high", "must be the largest ratio of cispo, such as 5, one more than grpo.clip_high")
            return
        keys.put("grpo.clip_high", float(high) - 1, "epsilon_high")
        keys.ignore_present("Ratios of cispo have no lower limit.", "epsilon")
        return
    keys.put("grpo.clip_low", low, "epsilon")
    name = "epsilon_high" if keys.has("epsilon_high") else "epsilon"
    keys.put("grpo.clip_high", float(keys.number(name) or low), name)


def _put_entropy(keys: TrainerConfig) -> None:
    if keys.flag("use_adaptive_entropy"):
        keys.refuse("use_adaptive_entropy", "grpo.entropy_weight is constant; set it, and remove use_adaptive_entropy")
    keys.copy(keys.real, {"entropy_coef": "grpo.entropy_weight"})


def _put_rloo(keys: TrainerConfig) -> None:
    keys.put("grpo.loss", "rloo")
    _put_clips(keys, "rloo")
    for name in ("normalize_advantages", "reward_clip_range"):
        if keys.has(name) and keys.value(name) not in (False, "false"):
            keys.refuse(name, "advantages and rewards of rloo are used as they are; remove it")
        elif keys.has(name):
            keys.ignore(name, "It is off.")
