"""Configs of TRL's commands: ``trl sft --config FILE``, or a script's command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.config.dialects.trainers.data_sources import TrainerDataSet, hub_source, is_local, put_sources, whole_split
from isthmus.config.dialects.trainers.methods import (
    drop_lora,
    lora_init,
    put_distillation,
    put_loaded_bits,
    put_lora,
    put_preference,
    put_template,
)
from isthmus.config.dialects.trainers.trainer_config import TrainerConfig
from isthmus.config.dialects.trainers.training_arguments import put_evaluation, put_model, put_training_arguments
from isthmus.config.dialects.trainers.trl_grpo import put_grpo
from isthmus.config.dialects.translation import World
from isthmus.config.recipes import RecipeName
from isthmus.errors import UsageError

_LORA = {
    "path": "adapter_name_or_path",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "dora": "use_dora",
    "rslora": "use_rslora",
    "init": "lora_init_weights",
    "lr_ratio": "loraplus_lr_ratio",
}
_VERBS: Mapping[str, RecipeName] = {
    "sft": "sft",
    "dpo": "dpo",
    "cpo": "dpo",
    "orpo": "dpo",
    "kto": "kto",
    "reward": "reward",
    "gkd": "distill",
    "grpo": "grpo",
    "rloo": "grpo",
}
_SIGNS: Mapping[RecipeName, tuple[str, ...]] = {
    "grpo": (
        *("num_generations", "reward_funcs", "reward_weights", "num_iterations", "epsilon", "epsilon_high"),
        *("generation_batch_size", "steps_per_generation", "scale_rewards", "normalize_advantages"),
    ),
    "distill": ("teacher_model_name_or_path",),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": (
        *("precompute_ref_log_probs", "rpo_alpha", "cpo_alpha", "simpo_gamma", "orpo_alpha", "reference_free", "beta"),
        *("max_prompt_length", "ref_model", "label_smoothing", "disable_dropout"),
    ),
}
"""Keys that only the configs of a recipe have."""
_DEFAULT_LR: Mapping[RecipeName, float] = {
    "sft": 2e-5,
    "dpo": 1e-6,
    "kto": 1e-6,
    "reward": 1e-4,
    "distill": 2e-5,
    "grpo": 1e-6,
}


def translate_trl(keys: TrainerConfig, verb: str | None) -> None:
    """Put the settings of a config of ``trl VERB``; None: the recipe follows from its keys."""
    signs = (recipe for recipe, names in _SIGNS.items() if any(keys.has(name) for name in names))
    if verb is not None and verb not in _VERBS:
        raise UsageError(f"trl {verb} is not a recipe of Isthmus; it has {', '.join(_VERBS)}.")
    recipe: RecipeName = _VERBS.get(verb, "sft") if verb else next(signs, "sft")
    keys.translation.recipe = recipe
    put_model(keys)
    _put_launcher(keys)
    put_training_arguments(keys)
    if not keys.has("learning_rate"):
        keys.put("optim.lr", _DEFAULT_LR[recipe], "learning_rate")
    _put_method(keys)
    if recipe == "dpo":
        _put_dpo(keys, verb)
    elif recipe == "kto":
        keys.put("kto.beta", keys.number("beta"), "beta")
        keys.copy(keys.text, {"loss_type": "kto.loss"})
    elif recipe == "grpo":
        put_grpo(keys, rloo=verb == "rloo" or keys.has("normalize_advantages"))
    elif recipe == "distill":
        put_distillation(keys)
        keys.put("distill.teacher", keys.text("teacher_model_name_or_path"), "teacher_model_name_or_path")
    elif keys.has("loss_type") and keys.text("loss_type") in ("nll", "chunked_nll"):
        keys.ignore("loss_type", "The loss is the cross entropy.")
    elif keys.has("loss_type"):
        keys.refuse("loss_type", "is not the loss of sft, which is the cross entropy")
    if recipe != "grpo":
        _put_text(keys)
    _put_data(keys)


def _put_launcher(keys: TrainerConfig) -> None:
    """Options of ``trl`` for accelerate."""
    ranks = keys.integer("num_processes") if keys.has("num_processes") else None
    if ranks is not None:
        keys.translation.world = World(nproc_per_node=keys.translation.world.nproc_per_node or ranks)
        keys.ignore("num_processes", "--nproc of the training command is the number of ranks.")
    config = (keys.text("accelerate_config") or "").lower()
    if "zero3" in config or "fsdp" in config:
        keys.put("parallel.fsdp", True, "accelerate_config")
    elif config:
        keys.ignore("accelerate_config", "Optimizer states are always sharded over data parallel ranks (ZeRO stage 1).")


def _put_method(keys: TrainerConfig) -> None:
    adapters = keys.flag("use_peft")
    if adapters:
        put_lora(keys, _LORA, init=lora_init(keys, "lora_init_weights"))
        if keys.value("lora_target_modules") is None:
            keys.put("lora.targets", ["q_proj", "v_proj"], "lora_target_modules")
    else:
        drop_lora(keys, _LORA)
    put_loaded_bits(keys, adapters=adapters)


def _put_dpo(keys: TrainerConfig, verb: str | None) -> None:
    losses = keys.words("loss_type") or [verb if verb in ("cpo", "orpo") else "sigmoid"]
    weights = keys.numbers("loss_weights") or [1.0] * len(losses)
    if len(weights) != len(losses):
        keys.refuse("loss_weights", f"has {len(weights)} weights for {len(losses)} losses")
    elif "sft" in losses and len(losses) == 2:
        place = losses.index("sft")
        keys.put("dpo.sft_weight", weights[place] / max(weights[1 - place], 1e-9), "loss_type", "loss_weights")
        losses = [loss for loss in losses if loss != "sft"]
    if len(losses) > 1:
        keys.refuse("loss_type", "has several preference losses; use one of them")
        return
    put_preference(keys, str(losses[0]), "loss_type", "orpo_alpha" if keys.has("orpo_alpha") else "beta")
    extras = {"label_smoothing": "label_smoothing", "simpo_gamma": "simpo_gamma"}
    extras |= {"rpo_alpha": "sft_weight", "cpo_alpha": "sft_weight"}
    keys.copy(keys.real, {name: f"dpo.{setting}" for name, setting in extras.items()})
    if keys.flag("reference_free"):
        keys.refuse("reference_free", "losses without a reference are dpo.loss=cpo, simpo and orpo; use one of them")
    else:
        keys.ignore_present("It is off.", "reference_free")


def _put_text(keys: TrainerConfig) -> None:
    length = next((name for name in ("max_length", "max_seq_length") if keys.has(name)), "max_length")
    keys.put("data.seq_length", keys.integer(length), length)
    keys.value("max_seq_length")
    if keys.recipe == "sft":
        keys.put("data.packing", keys.flag("packing"), "packing")
    why = "A packed sequence has whole samples, and attention stays within each of them."
    keys.ignore_present(why, "packing_strategy")
    keys.ignore_present("Validation data is packed as training data; the loss is the same.", "eval_packing")
    for name in ("chat_template_path", "chat_template"):
        put_template(keys, name)
    if keys.has("truncation_mode") and keys.text("truncation_mode") != "keep_start":
        keys.refuse("truncation_mode", "long samples lose their end; use keep_start, or data.overlong=drop")
    elif keys.has("truncation_mode"):
        keys.put("data.overlong", "truncate", "truncation_mode")
    if keys.has("eos_token"):
        keys.different("eos_token", "The token that ends a turn is that of the chat template.")
    assistant = [name for name in ("assistant_only_loss", "completion_only_loss") if keys.has(name)]
    for name in assistant:
        if keys.flag(name):
            keys.put("data.loss_on", "assistant", name)
        elif keys.recipe == "sft":
            keys.put("data.loss_on", "all", name)
    if keys.recipe == "sft" and not assistant:
        keys.translation.remark(
            "assistant_only_loss, completion_only_loss",
            "different",
            "TRL has loss on all tokens of chats by default, Isthmus on the assistant's; data.loss_on=all is TRL's.",
        )
    for name in ("max_prompt_length", "max_completion_length"):
        if keys.has(name):
            keys.different(name, "data.seq_length limits prompt and answer together.")


def _put_data(keys: TrainerConfig) -> None:
    sources: list[TrainerDataSet] = []
    if keys.has("datasets"):
        for entry in keys.entries("datasets"):
            sources.append(_source(keys, entry.get("path"), entry.get("name"), entry.get("split"), "datasets"))
        if sources:
            put_sources(keys, sources, "datasets")
    elif keys.has("dataset_name"):
        split = keys.text("dataset_train_split")
        source = _source(keys, keys.text("dataset_name"), keys.text("dataset_config"), split, "dataset_name")
        field = keys.text("dataset_text_field") if keys.has("dataset_text_field") else None
        columns = {"text": field} if field and field != "text" else {}
        put_sources(keys, [TrainerDataSet(source.files, columns)], "dataset_name")
    elif keys.has("dataset_mixture"):
        sources = _mixture(keys)
        if sources:
            put_sources(keys, sources, "dataset_mixture")
    else:
        keys.refuse("dataset_name", "is missing; give the data with --data")
    strategy = str(keys.text("eval_strategy") or keys.text("evaluation_strategy") or "no").lower()
    has_data = strategy not in ("no", "none", "false")
    if has_data and keys.has("dataset_name"):
        test = keys.text("dataset_test_split")
        valid = _source(keys, keys.text("dataset_name"), keys.text("dataset_config"), test, "dataset_name")
        keys.put("data.valid_files", list(valid.files), "dataset_test_split")
    elif not has_data:
        keys.put("data.valid_fraction", 0.0, "eval_strategy")
        keys.ignore_present("There is no validation during the run.", "dataset_test_split")
    put_evaluation(keys, has_data=has_data)


def _mixture(keys: TrainerConfig) -> list[TrainerDataSet]:
    """``dataset_mixture`` of the Alignment Handbook: whole data sets, and samples for validation."""
    mixture = keys.value("dataset_mixture")
    entries = mixture.get("datasets") if isinstance(mixture, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("id") for entry in entries):
        keys.refuse("dataset_mixture", "must have datasets, a list with the id of each")
        return []
    share = mixture.get("test_split_size")
    if isinstance(share, float) and share < 1:
        keys.put("data.valid_fraction", share, "dataset_mixture")
    elif share:
        keys.different("dataset_mixture", f"data.valid_fraction is a share, not {share} samples.")
    if any(entry.get("weight") not in (None, 1, 1.0) for entry in entries):
        keys.different("dataset_mixture", "All records of a data set are used, and weight is not applied.")
    return [_source(keys, entry["id"], entry.get("config"), entry.get("split"), "dataset_mixture") for entry in entries]


def _source(keys: TrainerConfig, path: Any, configuration: Any, split: Any, key: str) -> TrainerDataSet:
    path = str(path)
    if is_local(path):
        return TrainerDataSet((path,))
    base = whole_split(keys, key, str(split or "train"))
    return TrainerDataSet((hub_source(path, configuration, base),))
