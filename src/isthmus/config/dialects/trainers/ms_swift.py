"""Configs and command lines of ms-swift: ``swift sft``, ``rlhf`` and ``pt``, and the same of ``megatron``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from isthmus.config.dialects.trainers.data_sources import (
    TrainerDataSet,
    hub_source,
    is_local,
    put_sources,
    put_validation,
    weighted,
)
from isthmus.config.dialects.trainers.methods import (
    drop_lora,
    lora_init,
    put_distillation,
    put_lora,
    put_parameter_targets,
    put_preference,
    put_quantization,
    put_template,
    put_thinking,
)
from isthmus.config.dialects.trainers.trainer_config import TrainerConfig
from isthmus.config.dialects.trainers.training_arguments import put_evaluation, put_model, put_training_arguments
from isthmus.config.recipes import RecipeName
from isthmus.errors import UsageError

_LORA = {
    "path": "adapters",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules",
    "modules_to_save": "modules_to_save",
    "dora": "use_dora",
    "rslora": "use_rslora",
    "init": "init_weights",
    "lr_ratio": "lorap_lr_ratio",
}
_VERBS: Mapping[str, RecipeName] = {"sft": "sft", "pt": "pretrain", "rlhf": "dpo"}
_METHODS: Mapping[str, RecipeName] = {
    **dict.fromkeys(("dpo", "orpo", "simpo", "cpo"), "dpo"),
    "kto": "kto",
    "rm": "reward",
    "gkd": "distill",
}
_PARALLEL = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "sequence_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "virtual_pipeline_model_parallel_size": "vpp",
}
_OVERLONG = {"delete": "drop", "right": "truncate", "split": "split"}
_DATASET = re.compile(r"(?:(?P<hub>HF|MS|hf|ms)::)?(?P<path>[^:#]+)(?::(?P<subset>[^#]+))?(?:#(?P<number>\d+))?")


def translate_swift(keys: TrainerConfig, verb: str | None, *, megatron: bool) -> None:
    """Put the settings of ``swift VERB`` or ``megatron VERB``; None: the recipe follows from the keys."""
    verb = verb or ("rlhf" if keys.has("rlhf_type") else "sft")
    if verb not in _VERBS:
        raise UsageError(f"{verb} is not a training command of ms-swift; those are {', '.join(_VERBS)}.")
    keys.translation.recipe = _VERBS.get(verb, "sft")
    method = (keys.text("rlhf_type") or "dpo") if verb == "rlhf" else ""
    if method in ("grpo", "ppo"):
        keys.stop("rlhf_type", "is training on rollouts, which is not translated; see isthmus grpo")
    if method and method not in _METHODS:
        keys.stop("rlhf_type", f"is not a method of Isthmus; it has {', '.join(_METHODS)}")
    keys.translation.recipe = _METHODS.get(method, keys.translation.recipe)
    if keys.has("task_type") and keys.text("task_type") != "causal_lm":
        keys.stop("task_type", "is not a training of Isthmus; it has causal_lm, and reward models")
    keys.value("task_type")
    adapters = (keys.text("tuner_type") if keys.has("tuner_type") or not megatron else "full") or "lora"
    if keys.has("train_type") and not keys.has("tuner_type"):
        adapters = keys.text("train_type") or adapters
    put_model(keys)
    _put_layout(keys)
    put_training_arguments(keys)
    _put_recomputation(keys, megatron=megatron)
    _put_rates(keys, adapters, megatron=megatron)
    if keys.has("global_batch_size"):
        keys.put("train.global_batch_size", keys.integer("global_batch_size"), "global_batch_size")
        keys.translation.remarks = [r for r in keys.translation.remarks if not r.reason.startswith("The batch is that")]
    _put_method(keys, adapters, "tuner_type" if keys.has("tuner_type") else "train_type")
    _put_preferences(keys, method)
    _put_text(keys)
    _put_experts(keys)
    _put_data(keys)


def _put_layout(keys: TrainerConfig) -> None:
    for name, setting in _PARALLEL.items():
        if not keys.has(name):
            continue
        size = keys.integer(name) or 1
        if size > 1 or setting == "etp":
            keys.put(f"parallel.{setting}", size, name)
        else:
            keys.ignore(name, "One rank is the default.")
    keys.ignore_present("It is on if parallel.tp is above 1.", "sequence_parallel")


def _put_recomputation(keys: TrainerConfig, *, megatron: bool) -> None:
    if megatron and not keys.has("recompute_granularity"):
        keys.put("train.recompute", "selective", "recompute_granularity")
    elif keys.has("recompute_granularity"):
        kind = keys.text("recompute_granularity") or "none"
        keys.put("train.recompute", kind, "recompute_granularity")
        if kind == "full" and keys.has("recompute_num_layers") and keys.text("recompute_method") == "block":
            keys.put("train.recompute_layers", keys.integer("recompute_num_layers"), "recompute_num_layers")
        elif keys.has("recompute_num_layers"):
            keys.ignore("recompute_num_layers", "The uniform method recomputes all layers.")
        if kind == "selective" and keys.has("recompute_modules"):
            keys.put("train.recompute_modules", keys.words("recompute_modules"), "recompute_modules")
        keys.value("recompute_method")


def _put_rates(keys: TrainerConfig, adapters: str, *, megatron: bool) -> None:
    if not keys.has("learning_rate"):
        keys.put("optim.lr", 1e-4 if adapters.startswith("lora") else 1e-5, "learning_rate")
    if not megatron and not keys.has("gradient_accumulation_steps") and not keys.has("global_batch_size"):
        keys.put("train.global_batch_size", 16, "gradient_accumulation_steps")
    keys.copy(keys.real, {"min_lr": "optim.min_lr"})
    keys.copy(keys.integer, {"lr_decay_iters": "optim.schedule_steps"})


def _put_method(keys: TrainerConfig, adapters: str, name: str) -> None:
    if adapters == "lora":
        put_lora(keys, _LORA, init=lora_init(keys, "init_weights"))
        for extra in ("target_regex", "mcore_adapter"):
            if keys.has(extra):
                keys.refuse(
                    extra, "give lora.targets, names or patterns with *, or lora.path, a folder of PEFT; remove it"
                )
        put_parameter_targets(keys, "target_parameters")
        if keys.has("merge_lora") and keys.flag("merge_lora"):
            keys.put("checkpoint.export_merged", True, "merge_lora")
        else:
            keys.ignore_present("The adapters are always exported, and the merged model too.", "merge_lora")
    elif adapters == "full":
        drop_lora(keys, _LORA)
        keys.value("merge_lora")
    else:
        keys.refuse(name, "is not a method of Isthmus; use lora or full")
    for key in ("tuner_type", "train_type"):
        keys.value(key)
    if keys.has("quant_bits"):
        put_quantization(keys, keys.integer("quant_bits"), "quant_bits", adapters=adapters == "lora")
    keys.ignore_present("Quantized weights are multiplied in train.precision.", "bnb_4bit_compute_dtype")
    if keys.has("quant_method") and keys.text("quant_method") != "bnb":
        keys.refuse("quant_method", "bitsandbytes quantizes weights in Isthmus; use bnb")
    if keys.has("freeze_parameters"):
        keys.put("train.freeze", [f"{name}*" for name in keys.words("freeze_parameters")], "freeze_parameters")


def _put_preferences(keys: TrainerConfig, method: str) -> None:
    if keys.recipe == "dpo":
        loss = keys.text("loss_type") if method == "dpo" and keys.has("loss_type") else method
        put_preference(keys, loss or "sigmoid", "loss_type" if keys.has("loss_type") else "rlhf_type", "beta")
        extras = {"label_smoothing": "label_smoothing", "rpo_alpha": "sft_weight", "cpo_alpha": "sft_weight"}
        keys.copy(keys.real, {name: f"dpo.{setting}" for name, setting in extras.items()})
        if method == "simpo":
            keys.put("dpo.simpo_gamma", keys.number("simpo_gamma"), "simpo_gamma")
            if not keys.has("beta"):
                keys.put("dpo.beta", 2.0, "beta")
    elif keys.recipe == "kto":
        keys.put("kto.beta", keys.number("beta") if keys.has("beta") else 0.1, "beta")
    elif keys.recipe == "distill":
        put_distillation(keys)
    for name in ("loss_type", "rlhf_type", "simpo_gamma"):
        keys.value(name)
    if keys.has("lmbda") and keys.number("lmbda"):
        keys.refuse("lmbda", "distillation is on the records, without answers of the student; use 0")


def _put_text(keys: TrainerConfig) -> None:
    if keys.has("max_length"):
        keys.put("data.seq_length", keys.integer("max_length"), "max_length")
    else:
        keys.different("max_length", "data.seq_length is 2048 by default.")
    if keys.has("packing") or keys.recipe in ("sft", "pretrain", "distill"):
        keys.put("data.packing", keys.flag("packing"), "packing")
    if keys.recipe != "pretrain":
        overlong = keys.text("truncation_strategy") or "delete"
        if overlong in _OVERLONG:
            keys.put("data.overlong", _OVERLONG[overlong], "truncation_strategy")
        else:
            keys.refuse("truncation_strategy", "long samples lose their end; use delete, right or split")
        put_template(keys, "template")
        keys.copy(keys.text, {"system": "chat.system"})
    put_thinking(keys)
    scale = keys.text("loss_scale") if keys.has("loss_scale") else None
    if scale in ("last_round", "all") and keys.recipe in ("sft", "distill"):
        keys.put("data.loss_on", "last" if scale == "last_round" else "all", "loss_scale")
    elif scale == "ignore_empty_think":
        keys.different("loss_scale", "An empty reasoning block of an answer has loss as the rest of it.")
    elif scale not in (None, "default", "all", "last_round"):
        keys.refuse("loss_scale", "the weights of the loss are 0 or 1; use default, last_round or all")


def _put_experts(keys: TrainerConfig) -> None:
    losses = {"moe_aux_loss_coeff": "aux_loss", "router_aux_loss_coef": "aux_loss", "moe_z_loss_coeff": "z_loss"}
    losses |= {"moe_expert_capacity_factor": "capacity_factor"}
    keys.copy(keys.real, {name: f"moe.{setting}" for name, setting in losses.items()})
    if keys.has("mtp_num_layers"):
        keys.different("mtp_num_layers", "MTP layers are those of the model.")
    if keys.has("fp8_format"):
        keys.put("train.precision", "fp8", "fp8_format")
        if keys.text("fp8_format") in ("e4m3", "hybrid"):
            keys.put("train.fp8_format", keys.text("fp8_format"), "fp8_format")
    if keys.has("optimizer_cpu_offload") and keys.flag("optimizer_cpu_offload"):
        keys.put("optim.offload", True, "optimizer_cpu_offload")
    keys.copy(keys.integer, {"early_stop_interval": "train.early_stopping"})


def _put_data(keys: TrainerConfig) -> None:
    sources = [source for name in _names(keys, "dataset") if (source := _source(keys, name, "dataset"))]
    sources = weighted(keys, "interleave_prob", sources, len(sources))
    if keys.has("columns") and isinstance(columns := keys.value("columns"), dict):
        mapped = {str(ours): str(theirs) for theirs, ours in columns.items()}
        sources = [TrainerDataSet(source.files, mapped, source.weight) for source in sources]
    if sources:
        put_sources(keys, sources, "dataset")
    else:
        keys.refuse("dataset", "is missing; give the data with --data")
    if any(file.startswith("hf:") for source in sources for file in source.files) and not keys.flag("use_hf"):
        why = "These are ids of ModelScope; Isthmus downloads models and data from the Hugging Face Hub."
        keys.translation.remark(keys.origin("model_name_or_path", "dataset"), "different", why)
    keys.value("use_hf")
    if keys.has("custom_dataset_info"):
        keys.refuse("custom_dataset_info", "give the files of the data sets in dataset, and remove it")
    valid = (_source(keys, name, "val_dataset") for name in _names(keys, "val_dataset"))
    files = [file for source in valid if source is not None for file in source.files]
    has_data = put_validation(keys, "split_dataset_ratio", files=files, files_name="val_dataset")
    put_evaluation(keys, has_data=has_data)


def _names(keys: TrainerConfig, name: str) -> list[str]:
    value = keys.value(name)
    return [str(item) for item in value] if isinstance(value, list) else str(value).split() if value else []


def _source(keys: TrainerConfig, name: str, key: str) -> TrainerDataSet | None:
    match = _DATASET.fullmatch(name)
    if match is None:
        keys.refuse(key, f"{name!r} is not a data set; use FILE or ORG/NAME")
        return None
    if match["number"]:
        why = "All records of a data set are used; make a smaller file to use fewer."
        keys.translation.remark(f"#{match['number']}", "different", why)
    path = match["path"]
    if is_local(path):
        return TrainerDataSet((path,))
    return TrainerDataSet((hub_source(path, match["subset"], "train"),))
