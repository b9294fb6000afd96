"""Configs of axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.config.dialects.trainers.data_sources import (
    TrainerDataSet,
    hub_source,
    is_local,
    put_sources,
    put_validation,
    whole_split,
)
from isthmus.config.dialects.trainers.methods import (
    drop_lora,
    lora_init,
    put_loaded_bits,
    put_lora,
    put_parameter_targets,
    put_preference,
    put_template,
)
from isthmus.config.dialects.trainers.trainer_config import TrainerConfig
from isthmus.config.dialects.trainers.training_arguments import (
    put_batch,
    put_evaluation,
    put_model,
    put_training_arguments,
)

_LORA = {
    "path": "lora_model_dir",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "dora": "peft_use_dora",
    "rslora": "peft_use_rslora",
    "init": "peft_init_lora_weights",
    "lr_ratio": "loraplus_lr_ratio",
}
_PARALLEL = {
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
    "expert_parallel_size": "ep",
}
_PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "cpo")
_FIELDS = {
    "field_messages": "messages",
    "field": "text",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_tools": "tools",
}
_PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}
_PLUGINS = ("liger", "cut_cross_entropy", "spectrum", "scattermoe", "sonicmoe", "kernels")
"""Plugins that change the speed only."""


def translate_axolotl(keys: TrainerConfig) -> None:
    """Put the settings of a config."""
    _put_recipe(keys)
    put_model(keys)
    _put_layout(keys)
    put_training_arguments(keys)
    _put_saving(keys)
    _put_batch_of_ranks(keys)
    _put_method(keys)
    _put_trackers(keys)
    _put_text(keys)
    _put_data(keys)
    _put_schedule(keys)
    _ignore_kinds(keys)


def _put_layout(keys: TrainerConfig) -> None:
    for name, setting in _PARALLEL.items():
        if keys.has(name) and (size := keys.integer(name) or 1) > 1:
            keys.put(f"parallel.{setting}", size, name)
        else:
            keys.value(name)
    copies = keys.integer("dp_replicate_size") or 1 if keys.has("dp_replicate_size") else 1
    if keys.has("dp_shard_size") and (size := keys.integer("dp_shard_size") or 1) > 1:
        keys.put("parallel.fsdp", size if copies > 1 else True, "dp_shard_size")
    elif keys.has("dp_shard_size"):
        keys.ignore("dp_shard_size", "The weights are not sharded.")
    keys.ignore_present("The copies of the model follow from the number of ranks.", "dp_replicate_size")


def _put_saving(keys: TrainerConfig) -> None:
    if keys.has("save_strategy") or keys.has("save_steps"):
        keys.value("saves_per_epoch")
    elif keys.has("saves_per_epoch"):
        keys.different("saves_per_epoch", "checkpoint.every is in steps; the end of a run is always saved.")
    if not keys.has("save_steps"):
        keys.translation.settings.pop("checkpoint.every", None)


def _put_schedule(keys: TrainerConfig) -> None:
    if keys.has("cosine_min_lr_ratio"):
        share = keys.real("cosine_min_lr_ratio")
        keys.put("optim.min_lr", share * float(keys.translation.settings["optim.lr"] or 0.0), "cosine_min_lr_ratio")
    if keys.has("cosine_constant_lr_ratio") and keys.number("cosine_constant_lr_ratio"):
        keys.refuse("cosine_constant_lr_ratio", "the cosine has no constant end; use optim.schedule=wsd, and remove it")


def _ignore_kinds(keys: TrainerConfig) -> None:
    attention = ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "eager_attention")
    keys.ignore_present("Attention is exact; train.attention=auto selects its kernel.", *attention)
    kinds = ("type_of_model", "model_type", "tokenizer_type")
    keys.ignore_present("config.json and the tokenizer's files tell the family and the kind.", *kinds)
    for name in ("tokenizer_config", "base_model_config"):
        if keys.has(name) and keys.text(name) == keys.text("model_name_or_path"):
            keys.ignore(name, "It is that of the model.")
        elif keys.has(name) and name == "tokenizer_config":
            keys.put("tokenizer.path", keys.text(name), name)


def _put_batch_of_ranks(keys: TrainerConfig) -> None:
    if keys.has("batch_size") and not keys.has("gradient_accumulation_steps"):
        keys.put("train.global_batch_size", keys.integer("batch_size"), "batch_size")
    elif keys.has("batch_size"):
        keys.ignore("batch_size", "gradient_accumulation_steps gives the batch.")
        put_batch(keys)


def _put_method(keys: TrainerConfig) -> None:
    adapter = keys.text("adapter")
    if adapter in ("lora", "qlora"):
        if keys.flag("lora_target_linear"):
            keys.ignore("lora_target_modules", "lora_target_linear adds all linear layers.")
        put_lora(keys, _LORA, init=lora_init(keys, "peft_init_lora_weights"))
        if keys.flag("lora_target_linear"):
            keys.put("lora.targets", ["all-linear"], "lora_target_linear")
        put_parameter_targets(keys, "lora_target_parameters")
    elif adapter is not None:
        keys.refuse("adapter", "is not a method of Isthmus; use lora or qlora")
    else:
        drop_lora(keys, {**_LORA, "linear": "lora_target_linear", "parameters": "lora_target_parameters"})
    put_loaded_bits(keys, adapters=adapter is not None)


def _put_recipe(keys: TrainerConfig) -> None:
    method = keys.text("rl")
    if keys.flag("reward_model"):
        keys.translation.recipe = "reward"
    elif method == "kto":
        keys.translation.recipe = "kto"
        beta = "rl_beta" if keys.has("rl_beta") else "dpo_beta"
        keys.copy(keys.number, {beta: "kto.beta"})
    elif method in _PREFERENCES:
        beta = next((name for name in ("orpo_alpha", "rl_beta", "dpo_beta") if keys.has(name)), "dpo_beta")
        put_preference(keys, keys.text("dpo_loss_type") or method if method == "dpo" else method, "rl", beta)
        extras = {"dpo_label_smoothing": "label_smoothing", "simpo_gamma": "simpo_gamma"}
        extras |= {"cpo_alpha": "sft_weight", "rpo_alpha": "sft_weight"}
        keys.copy(keys.real, {name: f"dpo.{setting}" for name, setting in extras.items()})
    elif method == "grpo":
        keys.stop("rl", "is training on rollouts, which is not translated; see isthmus grpo")
    elif method is not None:
        keys.stop("rl", f"is not a method of Isthmus; it has {', '.join(_PREFERENCES)}, kto and reward models")


def _put_trackers(keys: TrainerConfig) -> None:
    trackers = {
        "wandb": ("wandb_project", "project", "use_wandb"),
        "mlflow": ("mlflow_tracking_uri", "mlflow_experiment_name", "use_mlflow"),
        "tensorboard": ("use_tensorboard",),
        "trackio": ("trackio_project_name", "use_trackio"),
    }
    used = [
        (tracker, next(name for name in names if keys.has(name)))
        for tracker, names in trackers.items()
        if any(keys.has(name) and keys.value(name) is not False for name in names)
    ]
    keys.put("logging.to", [tracker for tracker, _ in used], *(name for _, name in used))


def _put_text(keys: TrainerConfig) -> None:
    keys.put("data.seq_length", keys.integer("sequence_len"), "sequence_len")
    keys.put("data.packing", keys.flag("sample_packing"), "sample_packing")
    keys.ignore_present("Validation data is packed as training data; the loss is the same.", "eval_sample_packing")
    put_template(keys, "chat_template")
    keys.copy(keys.text, {"chat_template_jinja": "chat.template"})
    if keys.has("excess_length_strategy"):
        overlong = {"drop": "drop", "truncate": "truncate", "raise": "error"}
        keys.put(
            "data.overlong", overlong.get(str(keys.text("excess_length_strategy")), "drop"), "excess_length_strategy"
        )
    elif keys.recipe == "sft":
        keys.put("data.overlong", "drop", "excess_length_strategy")
    tokens = keys.value("special_tokens")
    others = {name: token for name, token in tokens.items() if name != "pad_token"} if isinstance(tokens, dict) else {}
    if keys.has("special_tokens"):
        why = f"{' and '.join(others)} of the tokenizer's files count; tokenizer.path gives others."
        keys.different("special_tokens", why) if others else keys.ignore("special_tokens", "There is never padding.")
    plugins = keys.words("plugins")
    if unknown := [name for name in plugins if not any(known in name.lower() for known in _PLUGINS)]:
        keys.refuse("plugins", f"Isthmus has no plugins, and {', '.join(unknown)} may change the training; remove it")
    elif plugins:
        keys.ignore("plugins", "They change kernels, not the training.")


def _put_data(keys: TrainerConfig) -> None:
    name = "pretraining_dataset" if keys.has("pretraining_dataset") else "datasets"
    if not keys.has(name):
        keys.refuse("datasets", "is missing; give the data with --data")
    entries = keys.entries(name)
    types = [str(entry.get("type")) for entry in entries]
    is_text = [kind == "completion" or kind.startswith("pretrain") for kind in types]
    if name == "pretraining_dataset" or (types and all(is_text)):
        keys.translation.recipe = "pretrain"
        keys.translation.settings.pop("data.overlong", None)
        keys.translation.settings.pop("chat.template", None)
    elif any(is_text):
        keys.refuse(name, "mixes texts (type: completion) and chats; train them in two runs")
    sources = [source for entry in entries if (source := _source(keys, entry, name))]
    if sources:
        put_sources(keys, sources, name)
    if keys.recipe == "sft" and keys.flag("train_on_inputs") and not any("chat_template" in kind for kind in types):
        keys.put("data.loss_on", "all", "train_on_inputs")
    else:
        keys.ignore_present("The loss is on answers.", "train_on_inputs")
    files = [
        file
        for entry in keys.entries("test_datasets")
        if (source := _source(keys, entry, "test_datasets"))
        for file in source.files
    ]
    has_data = put_validation(keys, "val_set_size", files=files, files_name="test_datasets")
    if keys.has("evals_per_epoch") and has_data and keys.number("evals_per_epoch"):
        keys.different(
            "evals_per_epoch", "The loss is measured at the start and at the end; train.eval_every is in steps."
        )
    else:
        keys.ignore_present("There is no validation during the run.", "evals_per_epoch")
    put_evaluation(keys, has_data=has_data)


def _source(keys: TrainerConfig, entry: Mapping[str, Any], key: str) -> TrainerDataSet | None:
    path, files = str(entry.get("path") or ""), entry.get("data_files")
    if not path:
        keys.refuse(key, "has a data set without path; give the data with --data")
        return None
    if files:
        names = [files] if isinstance(files, str) else [str(file) for file in files]
        local = path in ("json", "csv", "parquet", "text", "arrow") or is_local(path)
        prefix = "" if path in ("json", "csv", "parquet", "text", "arrow") else f"{path}/"
        if not local:
            keys.different(key, f"All files of the data set {path} are read, not only {', '.join(names)}.")
        paths = tuple(f"{prefix}{file}" for file in names) if local else (hub_source(path),)
    elif is_local(path):
        paths = (path,)
    else:
        split = whole_split(keys, "split", str(entry.get("split") or "train"))
        paths = (hub_source(path, entry.get("name"), split),)
    columns = _columns(keys, entry, key)
    return None if columns is None else TrainerDataSet(paths, columns)


def _columns(keys: TrainerConfig, entry: Mapping[str, Any], key: str) -> dict[str, str] | None:
    """``data.columns`` of a data set; None with an error."""
    kind = entry.get("type")
    fields: dict[str, Any] = {**entry, **kind} if isinstance(kind, dict) else dict(entry)
    if isinstance(kind, dict) and any(name in kind for name in ("format", "system_format", "no_input_format")):
        keys.different(
            key, "The prompt of a record is its instruction and input in the chat template, not its own format."
        )
    for name, known in _PROPERTIES.items():
        mapped = (entry.get("message_property_mappings") or {}).get(name)
        mapped = entry.get(f"message_field_{name}", mapped)
        if mapped is not None and mapped not in known:
            keys.refuse(key, f"has turns whose {name} is {mapped!r}; rename it to {known[0]}")
            return None
    if (roles := entry.get("roles_to_train")) not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        keys.refuse(key, f"has roles_to_train {roles}; the loss is on assistant turns, or data.loss_on=all")
        return None
    columns = {ours: str(fields[theirs]) for theirs, ours in _FIELDS.items() if fields.get(theirs)}
    if columns.get("messages") == "conversations":
        del columns["messages"]
    return {ours: field for ours, field in columns.items() if ours != field}
