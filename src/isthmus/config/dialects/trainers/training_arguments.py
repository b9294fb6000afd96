"""The keys of transformers' TrainingArguments, which all trainers for Hugging Face models have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.dialects.trainers.trainer_config import TrainerConfig

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "cosine_with_restarts": "cosine_with_restarts",
    "inverse_sqrt": "inverse_sqrt",
    "inverse-square-root": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
_ADAMW = re.compile(r"(paged_)?adamw(_torch|_torch_fused|_hf|_apex_fused|_32bit|_fused|_torch_xla)?")
_ADAMW_8BIT = re.compile(r"(paged_)?adamw(_torch|_bnb)?_8bit")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_MAX_SECONDS = 1e6


def put_training_arguments(keys: TrainerConfig) -> None:
    """Everything but model, data and the method."""
    keys.copy(keys.text, {"output_dir": "out"})
    put_batch(keys)
    _put_length(keys)
    put_learning_rate(keys)
    _put_optimizer(keys)
    _put_precision(keys)
    _put_saving(keys)
    _put_logging(keys)
    _put_memory(keys)
    _put_hub(keys)
    keys.put("train.seed", keys.integer("seed"), "seed")
    data_seed = "data_seed" if keys.has("data_seed") else "seed"
    keys.put("data.seed", keys.integer(data_seed), data_seed)
    keys.copy(keys.number, {"neftune_noise_alpha": "train.neftune_alpha"})
    for name in ("no_cuda", "use_cpu"):
        if keys.flag(name):
            keys.put("platform", "cpu", name)
    if keys.has("ddp_timeout"):
        keys.put("parallel.timeout_s", min(keys.number("ddp_timeout") or 600.0, _MAX_SECONDS), "ddp_timeout")
    keys.ignore_present("Attention is exact; train.attention=auto selects its kernel.", "attn_implementation")


def put_batch(keys: TrainerConfig) -> None:
    """The global batch is that of all data parallel ranks."""
    size, accumulation = keys.integer("per_device_train_batch_size"), keys.integer("gradient_accumulation_steps")
    if size is None or accumulation is None:
        return
    layout = [keys.translation.settings.get(f"parallel.{name}", 1) for name in ("tp", "pp", "cp")]
    nproc = keys.translation.world.nproc_per_node
    ranks = max((nproc or 1) // (layout[0] * layout[1] * layout[2]), 1)
    keys.put("train.micro_batch_size", size, "per_device_train_batch_size")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    keys.put("train.global_batch_size", size * accumulation * ranks, *names)
    if nproc is None:
        where = keys.origin(*names)
        why = "The batch is that of one data parallel rank; --nproc N of this command makes it that of N ranks."
        keys.translation.remark(where, "different", why)


def _put_length(keys: TrainerConfig) -> None:
    steps = keys.integer("max_steps") if keys.has("max_steps") else None
    if steps is not None and steps > 0:
        keys.put("train.steps", steps, "max_steps", "num_train_epochs")
    else:
        keys.put("train.epochs", keys.real("num_train_epochs"), "num_train_epochs")


def put_learning_rate(keys: TrainerConfig) -> None:
    """Learning rate, schedule and warm-up."""
    lr = keys.number("learning_rate")
    keys.put("optim.lr", lr, "learning_rate")
    name = (keys.text("lr_scheduler_type") or "").lower()
    options = keys.value("lr_scheduler_kwargs") or {}
    if isinstance(options, str):
        options = json.loads(options) if options.startswith("{") else {}
    if name not in _SCHEDULES:
        keys.refuse("lr_scheduler_type", f"is not a schedule of Isthmus; use one of {', '.join(_SCHEDULES)}")
        return
    keys.put("optim.schedule", _SCHEDULES[name], "lr_scheduler_type")
    _put_schedule_options(keys, name, options, lr or 0.0)
    if name == "constant":
        keys.put("optim.warmup_steps", 0, "lr_scheduler_type")
        for warmup in ("warmup_steps", "warmup_ratio"):
            keys.ignore(warmup, "The schedule constant has no warm-up; constant_with_warmup has one.")
    else:
        _put_warmup(keys)


def _put_schedule_options(keys: TrainerConfig, name: str, options: Mapping[str, Any], lr: float) -> None:
    source = ("lr_scheduler_kwargs",)
    if name == "polynomial":
        keys.put("optim.min_lr", float(options.get("lr_end", 1e-7)), *source)
        keys.put("optim.power", float(options.get("power", 1.0)), *source)
    if name == "cosine_with_restarts" and "num_cycles" in options:
        keys.put("optim.num_cycles", int(options["num_cycles"]), *source)
    if name == "cosine_with_min_lr":
        keys.put("optim.min_lr", float(options.get("min_lr") or options.get("min_lr_rate", 0.0) * lr), *source)
    if name == "warmup_stable_decay":
        if "num_decay_steps" in options:
            keys.put("optim.decay_steps", int(options["num_decay_steps"]), *source)
        else:
            keys.refuse("lr_scheduler_kwargs", "needs num_decay_steps, the steps of the final decay")
        keys.put("optim.min_lr", float(options.get("min_lr_ratio", 0.0)) * lr, *source)


def _put_warmup(keys: TrainerConfig) -> None:
    steps = keys.number("warmup_steps") or 0
    share = keys.number("warmup_ratio") or 0
    if keys.has("warmup_steps") and not keys.has("warmup_ratio"):
        share = 0
    if 0 < steps < 1:  # transformers 5
        share, steps, source = steps, 0, "warmup_steps"
    else:
        source = "warmup_ratio"
    if share and not steps:
        keys.put("optim.warmup_fraction", float(share), source)
    else:
        keys.put("optim.warmup_steps", int(steps), "warmup_steps")


def _put_optimizer(keys: TrainerConfig) -> None:
    name = (keys.text("optim") or "").lower()
    if _ADAMW.fullmatch(name):
        kind = "adamw"
    elif _ADAMW_8BIT.fullmatch(name):
        kind = "adamw_8bit"
    elif name == "muon":
        kind = "muon"
    else:
        keys.refuse("optim", "is not an optimizer of Isthmus; use adamw_torch, adamw_8bit or muon")
        return
    keys.put("optim.optimizer", kind, "optim")
    for setting, key in (
        ("beta1", "adam_beta1"),
        ("beta2", "adam_beta2"),
        ("eps", "adam_epsilon"),
        ("weight_decay", "weight_decay"),
        ("clip_grad", "max_grad_norm"),
    ):
        if (value := keys.number(key)) is not None:
            keys.put(f"optim.{setting}", max(float(value), 0.0), key)


def _put_precision(keys: TrainerConfig) -> None:
    for name, precision in (("bf16", "bf16"), ("fp16", "fp16")):
        if (keys.text(name) or "").lower() == "auto":
            keys.ignore(name, "The precision of the platform is the default.")
        elif keys.has(name) and keys.flag(name):
            keys.put("train.precision", precision, name)
    for name in ("torch_dtype", "dtype"):
        dtype = (keys.text(name) or "").removeprefix("torch.").lower()
        if dtype in _DTYPES and "train.precision" not in keys.translation.settings:
            keys.put("train.precision", _DTYPES[dtype], name)
        elif dtype:
            keys.ignore(name, "Weights are trained with float32 main weights; train.precision is that of matmuls.")


def put_evaluation(keys: TrainerConfig, *, has_data: bool) -> None:
    """``has_data``: the config has validation data, a part of the training data included."""
    names = ("eval_strategy", "evaluation_strategy", "eval_steps", "load_best_model_at_end")
    strategy = next((str(keys.value(name)).lower() for name in names[:2] if keys.has(name)), None)
    steps = keys.number("eval_steps") if keys.has("eval_steps") else None
    if strategy is None:
        strategy = "no" if steps is None else "steps"
    if strategy == "steps" and steps is None:
        steps = keys.number("logging_steps") or 500
    if has_data and strategy == "steps" and steps is not None and steps >= 1:
        keys.put("train.eval_every", int(steps), *names[:3])
        if keys.flag("load_best_model_at_end"):
            keys.put("checkpoint.keep_best", True, "load_best_model_at_end")
    keys.ignore_present("A run with validation data always evaluates at the start and at the end.", "do_eval")
    for name in names:
        if keys.has(name) and "train.eval_every" in keys.translation.settings:
            keys.value(name)
        elif keys.has(name) and has_data and strategy != "no":
            keys.different(name, "The loss is measured at the start and at the end; train.eval_every is in steps.")
        elif keys.has(name):
            keys.ignore(name, "There is no validation during the run.")
        else:
            keys.value(name)


def _put_saving(keys: TrainerConfig) -> None:
    strategy = keys.text("save_strategy")
    steps = keys.number("save_steps")
    setting = "checkpoint.hf_every" if keys.flag("save_only_model") else "checkpoint.every"
    if strategy == "steps" and steps and steps >= 1:
        keys.put(setting, int(steps), "save_steps")
    elif keys.has("save_strategy"):
        keys.different("save_strategy", "checkpoint.every is in steps; the end of a run is always saved.")
    if keys.is_on("save_only_model"):
        keys.put(setting, int(steps or 500), "save_only_model", "save_steps")
    if keys.has("save_total_limit"):
        keys.put("checkpoint.keep", max(keys.integer("save_total_limit") or 1, 1), "save_total_limit")


def _put_logging(keys: TrainerConfig) -> None:
    if keys.has("logging_steps"):
        keys.put("logging.every", max(int(keys.number("logging_steps") or 1), 1), "logging_steps")
    keys.ignore_present("metrics.jsonl has every step; logging.every is that of log lines.", "logging_strategy")
    if keys.has("report_to"):
        trackers = keys.words("report_to")
        known = [name for name in _TRACKERS if name in trackers]
        keys.put("logging.to", list(_TRACKERS) if trackers == ["all"] else known, "report_to")
        if other := [name for name in trackers if name not in (*_TRACKERS, "none", "all")]:
            keys.different("report_to", f"{', '.join(other)} is not supported; logging.to has {', '.join(_TRACKERS)}.")
    keys.copy(keys.text, {"run_name": "logging.name", "project": "logging.project"})


def _put_memory(keys: TrainerConfig) -> None:
    if keys.value("gradient_checkpointing") not in (None, ""):
        on = keys.flag("gradient_checkpointing") or keys.text("gradient_checkpointing") in ("offload", "unsloth")
        keys.put("train.recompute", "full" if on else "none", "gradient_checkpointing")
    keys.ignore_present("Layers are recomputed in one way.", "gradient_checkpointing_kwargs")
    fused = "The loss is always fused, and train.compile=auto fuses norms and activations on GPUs."
    keys.ignore_present(fused, "use_liger_kernel", "enable_liger_kernel", "liger_kernel_config")
    if keys.has("deepspeed"):
        _put_deepspeed(keys, str(keys.value("deepspeed")), keys.value("deepspeed"))
    _put_fsdp(keys)


def _put_deepspeed(keys: TrainerConfig, name: str, config: Any) -> None:
    """ZeRO stage 3 shards weights; lower stages are what Isthmus always does."""
    if isinstance(config, str) and Path(config).is_file() and config.endswith(".json"):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except ValueError:
            keys.refuse("deepspeed", "is not JSON")
            return
    zero = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
    match = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name.lower())
    stage = zero.get("stage", int(match[1]) if match else None)
    offload = zero.get("offload_optimizer") is not None or "offload" in name.lower()
    if stage == 3:
        keys.put("parallel.fsdp", True, "deepspeed")
    elif stage is None:
        keys.refuse("deepspeed", "is not here to read; set parallel.fsdp=true if it is ZeRO stage 3, and remove it")
        return
    else:
        keys.ignore("deepspeed", "Optimizer states are always sharded over data parallel ranks (ZeRO stage 1).")
    if offload:
        keys.different("deepspeed", "optim.offload=true keeps the optimizer's state in host memory, if it is needed.")


def _put_fsdp(keys: TrainerConfig) -> None:
    strategy = " ".join(keys.words("fsdp")) if not isinstance(keys.value("fsdp"), bool) else str(keys.flag("fsdp"))
    options = keys.value("fsdp_config")
    options = options if isinstance(options, dict) else {}
    sharding = str(options.get("fsdp_sharding_strategy", "")).upper()
    name = "fsdp" if keys.has("fsdp") else "fsdp_config" if keys.has("fsdp_config") else "fsdp_version"
    on = any(keys.has(key) for key in ("fsdp", "fsdp_config", "fsdp_version")) and strategy != "False"
    if on and ("no_shard" in strategy or sharding == "NO_SHARD"):
        keys.ignore(name, "The weights are not sharded.")
    elif on:
        keys.put("parallel.fsdp", True, name, "fsdp", "fsdp_config", "fsdp_version")
        if "hybrid_shard" in strategy or sharding.startswith("HYBRID_SHARD"):
            keys.different(name, "parallel.fsdp=N shards over groups of N ranks, such as the GPUs of a machine.")
        if "offload" in strategy or options.get("fsdp_offload_params") or options.get("offload_params"):
            keys.different(name, "optim.offload=true keeps the optimizer's state in host memory, if it is needed.")
    for key in ("fsdp", "fsdp_config", "fsdp_version"):
        keys.value(key)


def _put_hub(keys: TrainerConfig) -> None:
    repository = keys.text("hub_model_id")
    if repository and (keys.flag("push_to_hub") or not keys.has("push_to_hub")):
        keys.put("checkpoint.push", repository, "hub_model_id", "push_to_hub")
        if keys.has("hub_private_repo") and not keys.flag("hub_private_repo"):
            keys.put("checkpoint.push_public", True, "hub_private_repo")
    elif keys.flag("push_to_hub"):
        keys.different("push_to_hub", "Give the repository with checkpoint.push=NAMESPACE/NAME.")
    for name in ("hub_private_repo", "push_to_hub"):
        keys.value(name)


def put_model(keys: TrainerConfig) -> None:
    """The model's folder or id, and a revision of it."""
    path = keys.text("model_name_or_path")
    if path is None:
        keys.refuse("model_name_or_path", "is missing; add the model's folder or id")
        return
    keys.put("model.path", path, "model_name_or_path")
    if keys.has("model_revision"):
        if keys.text("model_revision") in ("main", "master"):
            keys.ignore("model_revision", "It is the default.")
        else:
            keys.refuse("model_revision", "download this revision into a folder, give it as the model, and remove it")
    if keys.flag("trust_remote_code"):
        keys.put("model.trust_remote_code", True, "trust_remote_code")
    else:
        keys.ignore_present("It is off.", "trust_remote_code")
