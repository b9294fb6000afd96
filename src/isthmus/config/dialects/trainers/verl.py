"""Configs of verl: overrides of ``python -m verl.trainer.main_ppo``, or the YAML that Hydra writes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.config.dialects.trainers.data_sources import TrainerDataSet, put_sources
from isthmus.config.dialects.trainers.trainer_config import TrainerConfig
from isthmus.config.dialects.translation import World

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_SHARDED_LAYOUT = {
    "ulysses_sequence_parallel_size": "cp",
    "fsdp_config.ulysses_sequence_parallel_size": "cp",
    "veomni.ulysses_parallel_size": "cp",
    "veomni.expert_parallel_size": "ep",
}
"""Sizes of FSDP and VeOmni, with their settings."""
_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
"""``loss_agg_mode`` of the clipped loss, and the loss of Isthmus with the same mean."""
_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_SCHEDULES = ("constant", "cosine", "linear")
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
_OFF = "It belongs to a switch that is off."
_NO_REWARD = (
    "verl chooses a function by data_source. Set rollout.reward: exact_match is that of GSM8K, math_verify that of "
    "mathematics."
)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name, without those that refer to others (``${oc.select:...}``), which are defaults."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        elif name not in ("_target_", "defaults") and not (isinstance(value, str) and "${" in value):
            flat[f"{prefix}{name}"] = value
    return flat


def translate_verl(keys: TrainerConfig) -> None:
    """Put the settings of a run of GRPO, Dr. GRPO, DAPO, GSPO, CISPO or REINFORCE++ with a baseline."""
    keys.translation.recipe = "grpo"
    _put_model(keys)
    _put_layout(keys)
    updates = _put_batches(keys)
    _put_data(keys)
    _put_rewards(keys)
    _put_generation(keys)
    _put_loss(keys)
    _put_divergence(keys)
    _put_optimizer(keys)
    _put_trainer(keys, updates)


def _put_model(keys: TrainerConfig) -> None:
    path = keys.text(f"{_MODEL}.path")
    if path is None:
        keys.refuse(f"{_MODEL}.path", "is missing; add the model's folder or id")
    else:
        keys.put("model.path", path, f"{_MODEL}.path")
    if keys.flag(f"{_MODEL}.trust_remote_code"):
        keys.put("model.trust_remote_code", True, f"{_MODEL}.trust_remote_code")
    texts = {"tokenizer_path": "tokenizer.path", "custom_chat_template": "chat.template"}
    keys.copy(keys.text, {f"{_MODEL}.{name}": setting for name, setting in texts.items()})
    recompute = keys.flag(f"{_MODEL}.enable_gradient_checkpointing")
    keys.put("train.recompute", "full" if recompute else "none", f"{_MODEL}.enable_gradient_checkpointing")
    _put_lora(keys, "lora_rank", "lora_alpha", "target_modules")
    _put_lora(keys, "lora.rank", "lora.alpha", None)


def _put_lora(keys: TrainerConfig, rank: str, alpha: str, targets: str | None) -> None:
    """Adapters, of which a rank of 0 is none; target modules of Megatron's adapters have other names."""
    size = keys.integer(f"{_MODEL}.{rank}") or 0
    if size <= 0:
        keys.ignore_present("All weights are trained, without adapters.", f"{_MODEL}.{alpha}", f"{_MODEL}.{targets}")
        return
    keys.put("lora.rank", size, f"{_MODEL}.{rank}")
    keys.put("lora.alpha", float(keys.number(f"{_MODEL}.{alpha}") or size), f"{_MODEL}.{alpha}")
    if targets is not None and (names := keys.words(f"{_MODEL}.{targets}")):
        keys.put("lora.targets", names, f"{_MODEL}.{targets}")


def _put_layout(keys: TrainerConfig) -> None:
    names = (f"{_ACTOR}.strategy", "model_engine", "config_name")
    strategy = next((str(keys.text(name)) for name in names if keys.has(name)), "")
    is_megatron = "megatron" in strategy
    for name, setting in _LAYOUT.items():
        key = f"{_ACTOR}.megatron.{name}"
        if is_megatron and keys.has(key) and keys.text(key) != "null":
            keys.put(f"parallel.{setting}", keys.integer(key), key)
    if not is_megatron:
        keys.put("parallel.fsdp", True, f"{_ACTOR}.strategy")
        for name, setting in _SHARDED_LAYOUT.items():
            key = f"{_ACTOR}.{name}"
            if (keys.integer(key) or 1) > 1:
                keys.put(f"parallel.{setting}", keys.integer(key), key)
    else:
        keys.value(f"{_ACTOR}.strategy")
    ranks = keys.integer("trainer.n_gpus_per_node")
    nodes = keys.integer("trainer.nnodes") or 1
    if ranks is not None and keys.translation.world.nproc_per_node is None:
        keys.translation.world = World(nnodes=nodes, nproc_per_node=ranks)
    for name in ("trainer.n_gpus_per_node", "trainer.nnodes"):
        keys.ignore(name, "They are options of the command that starts the run.")


def _put_batches(keys: TrainerConfig) -> int:
    """The batch in answers; returns the optimizer steps of a rollout, which verl counts as one step."""
    group = keys.integer(f"{_ROLLOUT}.n") or 1
    if group < 2:
        keys.refuse(f"{_ROLLOUT}.n", "is the number of answers to a prompt, and must be 2 or more")
    keys.put("rollout.group_size", group, f"{_ROLLOUT}.n")
    prompts, update = keys.integer("data.train_batch_size") or 0, keys.integer(f"{_ACTOR}.ppo_mini_batch_size") or 0
    update = min(update, prompts)
    keys.put("train.global_batch_size", update * group, f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n")
    updates = prompts // update if update and prompts % update == 0 else 0
    if updates:
        keys.put("grpo.updates_per_rollout", updates, "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")
    else:
        keys.refuse("data.train_batch_size", f"is not a multiple of {_ACTOR}.ppo_mini_batch_size={update}")
    micro = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    if keys.flag(f"{_ACTOR}.use_dynamic_bsz"):
        keys.ignore(f"{_ACTOR}.use_dynamic_bsz", "Answers are packed; train.micro_batch_size limits a micro batch.")
    keys.copy(keys.integer, {micro: "train.micro_batch_size"})
    if (keys.integer(f"{_ACTOR}.ppo_epochs") or 1) > 1:
        keys.refuse(f"{_ACTOR}.ppo_epochs", "an answer is trained on once; lower ppo_mini_batch_size for more updates")
    return updates or 1


def _put_data(keys: TrainerConfig) -> None:
    files = keys.words("data.train_files")
    column = keys.text("data.prompt_key") or "prompt"
    if files:
        columns = {} if column == "prompt" else {"prompt": column}
        put_sources(keys, [TrainerDataSet((file,), columns) for file in files], "data.train_files")
    else:
        keys.refuse("data.train_files", "is missing; give the data with --data")
    if valid := keys.words("data.val_files"):
        keys.put("data.valid_files", valid, "data.val_files")
    else:
        keys.put("data.valid_fraction", 0.0, "data.val_files")
    prompt, answer = keys.integer("data.max_prompt_length") or 0, keys.integer("data.max_response_length") or 0
    keys.put("rollout.max_new_tokens", answer, "data.max_response_length")
    keys.put("data.seq_length", prompt + answer, "data.max_prompt_length", "data.max_response_length")
    if keys.flag("data.filter_overlong_prompts"):
        keys.put("data.overlong", "drop", "data.filter_overlong_prompts")
        keys.value("data.truncation")
    elif (keys.text("data.truncation") or "error") == "error":
        keys.put("data.overlong", "error", "data.truncation")
    else:
        keys.put("data.overlong", "drop", "data.truncation")
        keys.different("data.truncation", "Prompts that are too long are dropped, and never truncated.")
    if (samples := keys.integer("data.train_max_samples") or -1) > 0:
        keys.put("data.max_samples", samples, "data.train_max_samples")
    keys.copy(keys.integer, {"data.seed": "data.seed"})
    if keys.has("data.shuffle") and not keys.flag("data.shuffle"):
        keys.different("data.shuffle", "Prompts are always shuffled, by data.seed.")


def _put_rewards(keys: TrainerConfig) -> None:
    rewards, used = list[str](), list[str]()
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        if keys.has(f"{prefix}.path"):
            rewards.append(f"{keys.text(f'{prefix}.path')}:{keys.text(f'{prefix}.name') or 'compute_score'}")
            used += [f"{prefix}.path", f"{prefix}.name"]
        elif keys.has(f"{prefix}.name"):
            keys.ignore(f"{prefix}.name", "There is no file of it.")
    for switch, path in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if keys.flag(switch) and keys.has(path):
            rewards.append(str(keys.text(path)))
            used += [switch, path]
    if rewards:
        keys.put("rollout.reward", rewards, *used)
    else:
        keys.translation.remark("custom_reward_function.path", "different", _NO_REWARD)
    for prefix in _OVERLONG:
        if not keys.flag(f"{prefix}.enable"):
            continue
        keys.put("grpo.length_penalty_tokens", keys.integer(f"{prefix}.len") or 0, f"{prefix}.len", f"{prefix}.enable")
        if (keys.number(f"{prefix}.penalty_factor") or 1.0) != 1.0:
            keys.refuse(f"{prefix}.penalty_factor", "the largest penalty is 1; remove it")
    most = "algorithm.filter_groups.max_num_gen_batches"
    if not keys.flag("algorithm.filter_groups.enable"):
        keys.ignore_present(_OFF, most)
    else:
        keys.put("grpo.dynamic_sampling", True, "algorithm.filter_groups.enable")
        if (keys.integer(most) or 0) > 0:
            keys.put("grpo.max_generations", keys.integer(most), most)


def _put_generation(keys: TrainerConfig) -> None:
    keys.copy(keys.real, {f"{_ROLLOUT}.{name}": f"rollout.{name}" for name in ("temperature", "top_p")})
    if (keys.integer(f"{_ROLLOUT}.top_k") or -1) > 0:
        keys.refuse(f"{_ROLLOUT}.top_k", "tokens are drawn by rollout.temperature and rollout.top_p alone; remove it")
    for part in ("megatron", "fsdp_config", "veomni"):  # of the critic and the reference, there is no such state
        if keys.flag(f"{_ACTOR}.{part}.optimizer_offload"):
            keys.put("rollout.offload", True, f"{_ACTOR}.{part}.optimizer_offload")
    replay = f"{_ACTOR}.router_replay.mode"
    if (keys.text(replay) or "disabled") != "disabled":
        keys.different(
            replay, "Generation and training choose experts with the same weights and code, without a replay."
        )
    correction, threshold = (f"algorithm.rollout_correction.{name}" for name in ("rollout_is", "rollout_is_threshold"))
    level = keys.text(correction)
    if level in ("token", "sequence"):
        keys.put("grpo.correction", level, correction)
        keys.put("grpo.correction_cap", float(keys.number(threshold) or 2.0), threshold)
    else:
        keys.ignore_present(_OFF, threshold)
        if level is not None:
            keys.refuse(correction, "is not a correction of Isthmus; use token or sequence")


def _put_loss(keys: TrainerConfig) -> None:
    estimator, mean = keys.text("algorithm.adv_estimator"), keys.text(f"{_ACTOR}.loss_agg_mode") or "token-mean"
    mode = keys.text(f"{_ACTOR}.policy_loss.loss_mode") or "vanilla"
    if estimator not in ("grpo", "reinforce_plus_plus_baseline"):
        keys.refuse("algorithm.adv_estimator", "is not of Isthmus; use grpo or reinforce_plus_plus_baseline")
    if mode in ("gspo", "cispo"):
        loss = mode
        keys.different(f"{_ACTOR}.loss_agg_mode", f"{mode} has the mean of its paper.")
    elif mode != "vanilla":
        keys.refuse(f"{_ACTOR}.policy_loss.loss_mode", "is not a loss of grpo; use vanilla, gspo or cispo")
        return
    elif mean not in _LOSSES:
        keys.refuse(f"{_ACTOR}.loss_agg_mode", f"is not a mean of Isthmus; use one of {', '.join(_LOSSES)}")
        return
    else:
        loss = _LOSSES[mean]
    if estimator == "reinforce_plus_plus_baseline" and loss == "dapo":
        keys.put("grpo.loss", "reinforce_pp", "algorithm.adv_estimator")
    elif estimator == "reinforce_plus_plus_baseline":
        keys.refuse(f"{_ACTOR}.loss_agg_mode", "of reinforce_plus_plus_baseline must be token-mean")
    else:
        scaled = keys.flag("algorithm.norm_adv_by_std_in_grpo")
        keys.put("grpo.scale_advantages", "group" if scaled else "none", "algorithm.norm_adv_by_std_in_grpo")
        keys.put("grpo.loss", loss, f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.policy_loss.loss_mode")
        keys.value("algorithm.adv_estimator")
    for setting, name in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
        source = name if keys.has(f"{_ACTOR}.{name}") else "clip_ratio"
        if loss != "cispo" or setting == "clip_high":
            keys.put(f"grpo.{setting}", keys.real(f"{_ACTOR}.{source}"), f"{_ACTOR}.{source}")
    if keys.has(f"{_ACTOR}.clip_ratio_low") and keys.has(f"{_ACTOR}.clip_ratio_high"):
        keys.ignore_present("clip_ratio_low and clip_ratio_high count.", f"{_ACTOR}.clip_ratio")
    reason = "Ratios of answers with a negative advantage have no further limit."
    if keys.has(f"{_ACTOR}.clip_ratio_c"):
        keys.different(f"{_ACTOR}.clip_ratio_c", reason)
    else:
        keys.translation.remark(f"{_ACTOR}.clip_ratio_c: 3.0, {keys.origin('')}", "different", reason)
    keys.copy(keys.real, {f"{_ACTOR}.entropy_coeff": "grpo.entropy_weight"})


def _put_divergence(keys: TrainerConfig) -> None:
    if keys.flag("algorithm.use_kl_in_reward"):
        keys.refuse("algorithm.use_kl_in_reward", "the KL divergence is a part of the loss; set actor.use_kl_loss")
    if not keys.flag(f"{_ACTOR}.use_kl_loss"):
        for name in ("kl_loss_coef", "kl_loss_type"):
            keys.ignore(f"{_ACTOR}.{name}", _OFF)
        return
    weight, kind = keys.number(f"{_ACTOR}.kl_loss_coef"), keys.text(f"{_ACTOR}.kl_loss_type") or "low_var_kl"
    keys.put("grpo.kl_weight", float(weight or 0.0), f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.use_kl_loss")
    if not weight:
        keys.ignore_present("There is no KL divergence.", f"{_ACTOR}.kl_loss_type")
        return
    if kind not in _ESTIMATORS:
        keys.refuse(f"{_ACTOR}.kl_loss_type", f"is not an estimator of Isthmus; use one of {', '.join(_ESTIMATORS)}")
        return
    keys.put("grpo.kl_estimator", _ESTIMATORS[kind], f"{_ACTOR}.kl_loss_type")
    keys.put("grpo.kl_ratio", False, f"{_ACTOR}.kl_loss_type")


def _put_optimizer(keys: TrainerConfig) -> None:
    optim = f"{_ACTOR}.optim"
    keys.put("optim.lr", keys.number(f"{optim}.lr"), f"{optim}.lr")
    keys.put("optim.weight_decay", keys.number(f"{optim}.weight_decay"), f"{optim}.weight_decay")
    clip = f"{_ACTOR}.grad_clip" if keys.has(f"{_ACTOR}.grad_clip") else f"{optim}.clip_grad"
    keys.put("optim.clip_grad", keys.number(clip), clip)
    names = [f"{optim}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    name = next((name for name in names if keys.has(name)), names[0])
    schedule = keys.text(name) or "constant"
    if schedule not in _SCHEDULES:
        keys.refuse(name, f"is not a schedule of Isthmus; use one of {', '.join(_SCHEDULES)}")
        return
    keys.put("optim.schedule", schedule, name)
    keys.copy(keys.number, {f"{optim}.min_lr": "optim.min_lr"})
    steps, share = keys.integer(f"{optim}.lr_warmup_steps") or -1, keys.number(f"{optim}.lr_warmup_steps_ratio") or 0.0
    if steps > 0:
        keys.put("optim.warmup_steps", steps, f"{optim}.lr_warmup_steps")
    else:
        keys.put("optim.warmup_fraction", float(share), f"{optim}.lr_warmup_steps_ratio")
    if betas := keys.numbers(f"{optim}.betas"):
        keys.put("optim.beta1", betas[0], f"{optim}.betas")
        keys.put("optim.beta2", betas[-1], f"{optim}.betas")


def _put_trainer(keys: TrainerConfig, updates: int) -> None:
    steps = keys.integer("trainer.total_training_steps")
    if steps is not None and steps > 0:
        keys.put("train.steps", steps * updates, "trainer.total_training_steps", "trainer.total_epochs")
    else:
        keys.put("train.epochs", keys.real("trainer.total_epochs"), "trainer.total_epochs")
    for setting, name in (("checkpoint.every", "save_freq"), ("train.eval_every", "test_freq")):
        if (every := keys.integer(f"trainer.{name}") or -1) > 0:
            keys.put(setting, every * updates, f"trainer.{name}")
    keys.copy(keys.text, {"trainer.default_local_dir": "out"})
    if (most := keys.integer("trainer.max_actor_ckpt_to_keep") or 0) > 0:
        keys.put("checkpoint.keep", most, "trainer.max_actor_ckpt_to_keep")
    loggers = keys.words("trainer.logger")
    if known := [name for name in _TRACKERS if name in loggers]:
        keys.put("logging.to", known, "trainer.logger")
    if other := [name for name in loggers if name not in (*_TRACKERS, "console", "file")]:
        keys.different("trainer.logger", f"{', '.join(other)} is not supported; logging.to has {', '.join(_TRACKERS)}.")
    keys.copy(keys.text, {"trainer.project_name": "logging.project", "trainer.experiment_name": "logging.name"})
