"""Configs of LLaMA-Factory, with its dataset_info.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    put_lora,
    put_preference,
    put_quantization,
    put_template,
    put_thinking,
)
from isthmus.config.dialects.trainers.trainer_config import TrainerConfig
from isthmus.config.dialects.trainers.training_arguments import put_evaluation, put_model, put_training_arguments
from isthmus.config.recipes import RecipeName
from isthmus.files.input_files import read_bytes

_STAGES: Mapping[str, RecipeName] = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_LORA = {
    "path": "adapter_name_or_path",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target",
    "modules_to_save": "additional_target",
    "dora": "use_dora",
    "rslora": "use_rslora",
    "init": "pissa_init",
    "lr_ratio": "loraplus_lr_ratio",
}
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
}
"""Fields that LLaMA-Factory reads by default, by its names; the values are fields that Isthmus knows."""
_ROLES = ({"role_tag": "from", "content_tag": "value"}, {"role_tag": "role", "content_tag": "content"})
_INFO = "dataset_info.json"


def translate_llama_factory(keys: TrainerConfig, dataset_info: Path | None) -> None:
    """Put the settings of a training config."""
    stage = keys.text("stage") or "sft"
    if stage not in _STAGES:
        keys.stop("stage", f"is not a recipe of Isthmus; it has {', '.join(_STAGES)}")
    keys.translation.recipe = _STAGES.get(stage, "sft")
    if keys.has("export_dir") and not keys.has("dataset"):
        keys.stop("export_dir", "is a config that merges an adapter: isthmus merge BASE ADAPTER OUT")
    if keys.has("do_predict") and keys.flag("do_predict") and not keys.flag("do_train"):
        keys.stop("do_predict", "is a config that predicts: isthmus eval and isthmus chat do")
    put_model(keys)
    put_training_arguments(keys)
    _put_method(keys)
    _put_preferences(keys)
    _put_text(keys)
    _put_data(keys, dataset_info)
    if keys.flag("disable_gradient_checkpointing"):
        keys.put("train.recompute", "none", "disable_gradient_checkpointing")
    elif not keys.has("gradient_checkpointing"):
        keys.put("train.recompute", "full", "disable_gradient_checkpointing")
    keys.ignore_present("Attention is exact; train.attention=auto selects its kernel.", "flash_attn")
    keys.copy(keys.number, {"moe_aux_loss_coef": "moe.aux_loss"})
    keys.copy(keys.integer, {"early_stopping_steps": "train.early_stopping"})


def _put_method(keys: TrainerConfig) -> None:
    method = keys.text("finetuning_type")
    adapters = method == "lora"
    if method == "freeze":
        keys.refuse("finetuning_type", "give train.freeze, patterns of the tensors that are not trained, and remove it")
    elif method not in ("lora", "full"):
        keys.refuse("finetuning_type", "is not a method of Isthmus; use lora or full")
    if not adapters:
        drop_lora(keys, _LORA)
        keys.value("pissa_iter")
    else:
        iterations = keys.integer("pissa_iter") or 0
        pissa = "pissa" if iterations <= 0 else f"pissa_niter_{min(iterations, 99)}"
        on = keys.has("pissa_init") and keys.flag("pissa_init")
        put_lora(keys, _LORA, init=pissa if on else None)
        if keys.flag("create_new_adapter") and keys.has("adapter_name_or_path"):
            keys.refuse(
                "create_new_adapter", "merge the adapter with isthmus merge first, and train a new one of that model"
            )
    put_quantization(keys, keys.integer("quantization_bit"), "quantization_bit", adapters=adapters)
    if keys.has("quantization_method") and keys.text("quantization_method") not in ("bnb", "bitsandbytes"):
        keys.refuse("quantization_method", "bitsandbytes quantizes weights in Isthmus; use bnb")


def _put_preferences(keys: TrainerConfig) -> None:
    if keys.recipe == "dpo":
        put_preference(keys, keys.text("pref_loss") or "sigmoid", "pref_loss", "pref_beta")
        extras = {"pref_ftx": "sft_weight", "simpo_gamma": "simpo_gamma", "dpo_label_smoothing": "label_smoothing"}
        keys.copy(keys.real, {name: f"dpo.{setting}" for name, setting in extras.items()})
    elif keys.recipe == "kto":
        keys.put("kto.beta", keys.number("pref_beta"), "pref_beta")
        keys.value("pref_loss")
    for name in ("pref_beta", "pref_loss", "pref_ftx", "simpo_gamma", "dpo_label_smoothing"):
        if keys.recipe not in ("dpo", "kto") and keys.has(name):
            keys.ignore(name, f"It is for preferences, and the recipe is {keys.recipe}.")
        keys.value(name)
    if keys.recipe != "kto":
        why = f"It is for kto, and the recipe is {keys.recipe}."
        keys.ignore_present(why, "kto_chosen_weight", "kto_rejected_weight")


def _put_text(keys: TrainerConfig) -> None:
    keys.put("data.seq_length", keys.integer("cutoff_len"), "cutoff_len")
    packing = keys.flag("packing") if keys.has("packing") else keys.recipe == "pretrain"
    keys.put("data.packing", packing or keys.flag("neat_packing"), "packing", "neat_packing")
    if keys.recipe == "pretrain":
        for name in ("template", "default_system", "train_on_prompt", "mask_history", "enable_thinking"):
            keys.ignore(name, "Text has no chat template.")
        return
    put_template(keys, "template")
    keys.copy(keys.text, {"default_system": "chat.system"})
    for name, loss_on in (("train_on_prompt", "all"), ("mask_history", "last")):
        if keys.flag(name):
            keys.put("data.loss_on", loss_on, name)
    put_thinking(keys)


def _put_data(keys: TrainerConfig, dataset_info: Path | None) -> None:
    names = keys.words("dataset")
    folder = Path(keys.text("dataset_dir") or "data")
    info_file = dataset_info or folder / _INFO
    folder = info_file.parent if dataset_info is not None else folder
    info: dict[str, Any] | None = None
    if info_file.is_file():
        info = json.loads(read_bytes(info_file).decode("utf-8"))
    if keys.has("tokenized_path"):
        keys.refuse("tokenized_path", "is data that LLaMA-Factory has tokenized; give the records, and remove it")
    sources = [source for name in names if (source := _source(keys, name, "dataset", folder, info, info_file))]
    sources = weighted(keys, "interleave_probs", sources, len(names))
    keys.ignore_present("Data sets with weights are interleaved, others are concatenated and shuffled.", "mix_strategy")
    keys.copy(keys.integer, {"max_samples": "data.max_samples"})
    if sources:
        put_sources(keys, sources, "dataset")
    elif not names:
        keys.refuse("dataset", "is missing; give the data with --data")
    valid = (_source(keys, name, "eval_dataset", folder, info, info_file) for name in keys.words("eval_dataset"))
    files = [file for source in valid if source is not None for file in source.files]
    has_data = put_validation(keys, "val_size", files=files, files_name="eval_dataset")
    put_evaluation(keys, has_data=has_data)


def _source(
    keys: TrainerConfig, name: str, key: str, folder: Path, info: Mapping[str, Any] | None, info_file: Path
) -> TrainerDataSet | None:
    """The files of a name in dataset_info.json; None with an error."""
    if info is None or name not in info:
        if is_local(name) or "/" in name:
            return TrainerDataSet((name if is_local(name) else hub_source(name),))
        where = (
            f"is not in {info_file}" if info is not None else f"is a name in {_INFO}, and {info_file} does not exist"
        )
        keys.refuse(key, f"{name!r} {where}; give the file with --dataset-info {_INFO}, or the data with --data")
        return None
    entry = info[name]
    if "hf_hub_url" in entry:
        split = str(entry.get("split") or "train")
        files = (hub_source(str(entry["hf_hub_url"]), entry.get("subset") or entry.get("folder"), split),)
    elif "file_name" in entry:
        files = (str(folder / entry["file_name"]),)
    else:
        keys.refuse(key, f"{name!r} has no file_name and no hf_hub_url in {info_file}; give the data with --data")
        return None
    columns = _columns(keys, name, key, entry)
    return None if columns is None else TrainerDataSet(files, columns)


def _columns(keys: TrainerConfig, name: str, key: str, entry: Mapping[str, Any]) -> dict[str, str] | None:
    """``data.columns`` of an entry: only fields whose names Isthmus does not know."""
    formatting = str(entry.get("formatting", "alpaca"))
    if formatting not in _COLUMNS:
        formatting = "sharegpt"  # openai
    tags = {tag: entry.get("tags", {}).get(tag) for tag in ("role_tag", "content_tag")}
    if formatting == "sharegpt" and entry.get("tags") and tags not in _ROLES and any(tags.values()):
        keys.refuse(key, f"{name!r} has turns with other keys than role/content and from/value; rename them")
        return None
    given = dict(entry.get("columns") or {})
    if keys.recipe == "pretrain":
        field = given.get("prompt", "instruction" if not given else "text")
        return {} if field == "text" else {"text": str(field)}
    known = _COLUMNS[formatting]
    names = {"query": "input", "prompt": "instruction", "response": "output"}
    columns: dict[str, str] = {}
    for theirs, field in given.items():
        if theirs in ("images", "videos", "audios"):
            keys.refuse(key, f"{name!r} has {theirs}, and only text is trained")
            return None
        ours = str(names.get(theirs, theirs))
        if field in (None, "") or field == known.get(theirs, ours) or (ours == "messages" and field == "conversations"):
            continue
        columns["label" if theirs == "kto_tag" else ours] = str(field)
    return {ours: field for ours, field in columns.items() if ours != field}
