"""From an experiment of Primus to the settings of a run."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments
from isthmus.config.dialects.megatron.known_args import name_of, near
from isthmus.config.dialects.megatron.model_args import ARGUMENTS
from isthmus.config.dialects.megatron.translate_megatron import Told, from_arguments
from isthmus.config.dialects.primus.primus_files import CHECKOUT, Read, find_file, read_file
from isthmus.config.dialects.primus.primus_keys import (
    CONFIG_KEYS,
    DEFAULTS,
    INEXACT,
    PLACES,
    PRESETS,
)
from isthmus.config.dialects.primus.primus_known import own, own_keys
from isthmus.config.dialects.translation import Remark, Translation, World
from isthmus.errors import UsageError

_MODULE_KEYS = ("framework", "config", "model", "overrides", "name")
_SIZES = ("ffn_hidden_size", "kv_channels", "moe_ffn_hidden_size", "max_position_embeddings", "vocab_size")


def from_experiment(path: Path, models: Path | None = None) -> Told:
    """What an experiment tells.

    Args:
        path: the experiment, or the part of one that says ``model`` and ``overrides``.
        models: a folder with model files.

    Raises:
        MissingInput, IOFailure: the file is not there, or cannot be read.
        UsageError: what it says is no experiment of Megatron's, or cannot be; all of it.
    """
    file = read_file(path)
    module, module_name = _module(file)
    args, remarks = Arguments(), list[Remark]()
    config = str(module.get("config") or "pre_trainer.yaml")
    sft = "sft" in config or "post" in module_name
    said: dict[str, Any] = {}
    _add_defaults(args, said, config, sft, path, models, remarks)
    model, preset = _model(file, module, models)
    strange: list[str] = []
    if model is not None:
        for key, value in model.values.items():
            if key not in said:
                said[key] = value
                _say(args, key, value, f"{model.path.name}: {_line(key, value)}", remarks, strange)
    overrides = {key: value for key, value in module.items() if key not in _MODULE_KEYS}
    overrides |= module.get("overrides") or {}
    for key, value in overrides.items():
        said[key] = value
        _say(args, key, value, _line(key, value), remarks, None)
    if strange and model is not None:
        words = f"{model.path.name}: {', '.join(strange)}"
        remarks.append(Remark(words, "not at all", "These keys are not known, of Megatron-LM or of Primus."))
    if sft:
        args.say("sft", True, f"config: {config}")
    name = str(file.values.get("exp_name") or path.stem)
    weights = said.get("hf_path")
    if preset is None and weights is None and not args.said("num_layers"):
        raise UsageError(f"{path} names no model: it needs `model: NAME.yaml`, or the model's keys.")
    told = from_arguments(args, World(), name, model=preset is None and weights is None)
    _put_own(told.translation, file, said, args)
    if weights is not None:
        told.translation.put("model.path", str(weights), f"hf_path: {weights}")
    elif preset is not None:
        _put_preset(told.translation, preset, args, overrides)
    told.translation.remarks[:0] = _grouped(remarks)
    return told


def _module(file: Read) -> tuple[dict[str, Any], str]:
    """The part that trains, and its name."""
    modules = file.values.get("modules")
    if modules is None:
        # Its own part alone; overrides are laid over the rest of a file as it is read.
        return {key: value for key, value in file.values.items() if key not in (*PLACES, "platform")}, ""
    trainers = {name: part for name, part in modules.items() if "trainer" in name} if isinstance(modules, dict) else {}
    if len(trainers) != 1:
        raise UsageError(f"{file.path}  modules  has {len(trainers)} parts with trainer in their names; one is wanted.")
    ((name, part),) = trainers.items()
    if not isinstance(part, dict) or not isinstance(part.get("overrides") or {}, dict):
        raise UsageError(f"{file.path}  modules.{name}  is a mapping with framework, config, model and overrides.")
    if (framework := part.get("framework", "megatron")) != "megatron":
        raise UsageError(f"{file.path}  framework: {framework}  is not read; experiments of megatron are.")
    return part, name


def _add_defaults(
    args: Arguments,
    said: dict[str, Any],
    config: str,
    sft: bool,
    path: Path,
    models: Path | None,
    remarks: list[Remark],
) -> None:
    """What the module says before anybody else."""
    found = find_file(config, "modules", path, models)
    if found is not None:
        values, where = read_file(found).values, found.name
    else:
        stem = Path(config).stem
        values, where = (
            DEFAULTS.get(stem, DEFAULTS["sft_trainer" if sft else "pre_trainer"]),
            f"{stem}, Primus' default",
        )
    said.update(values)
    for key, value in values.items():
        _say(args, key, value, f"{where}: {_line(key, value)}", remarks, [], quiet=True)


def _model(file: Read, module: Mapping[str, Any], models: Path | None) -> tuple[Read | None, str | None]:
    """The model's file, or the preset that stands for it."""
    if (named := module.get("model")) is None:
        return None, None
    if (found := find_file(str(named), "models", file.path, models)) is not None:
        return read_file(found), None
    name = str(named).removesuffix(".yaml").lower()
    if name in PRESETS:
        return None, Path(str(named)).stem if str(named).endswith((".yaml", ".yml")) else str(named)
    near_names = difflib.get_close_matches(name, PRESETS, n=1)
    guess = f" Did you mean {near_names[0]}?" if near_names else ""
    raise UsageError(
        f"{file.path}  model: {named}  is not beside the experiment. Name the folder with --models, or a checkout of "
        f"Primus in {CHECKOUT}.{guess}"
    )


def _say(
    args: Arguments,
    key: str,
    value: Any,
    words: str,
    remarks: list[Remark],
    strange: list[str] | None,
    *,
    quiet: bool = False,
) -> None:
    """Take one key; ``strange`` collects unknown ones of Primus' own files, None makes them errors."""
    if (found := own(key)) is not None:
        became, why = found
        on = bool(value) and (not isinstance(value, dict) or bool(value.get("enabled")))
        if became == "refused" and on:
            args.complaints.append(f"{words}  {why}")
        elif became != "refused" and on and strange is None:
            remarks.append(Remark(words, became, why))  # type: ignore[arg-type]
        return
    if key in _CARRIED:
        return
    name, fixed = name_of(key)
    if name is None:
        if strange is not None:
            strange.append(key)
            return
        guess = near(key) or next(iter(difflib.get_close_matches(key, own_keys(), n=1)), None)
        args.complaints.append(
            f"{key}  is no key of Primus or Megatron-LM" + (f" (did you mean {guess}?)" if guess else "")
        )
        return
    if fixed is not None:
        value = fixed if value else None
    # What a file of a family says is no remark on this run.
    args.say(name, value, words, quiet=quiet or strange is not None)


def _line(key: str, value: Any) -> str:
    """A key as YAML has it."""
    return f"{key}: {json.dumps(value) if value is None or isinstance(value, bool | list | dict) else value}"


_CARRIED = (*PLACES, "auto_continue_train", "disable_last_saving", "sft_dataset_name", "sft_dataset_split", "hf_path")
"""Keys that are translated here, not with Megatron-LM's."""


def _grouped(remarks: list[Remark]) -> list[Remark]:
    """Remarks of the same reason in one."""
    alike: dict[tuple[Any, str], list[str]] = {}
    for remark in remarks:
        alike.setdefault((remark.became, remark.why), []).append(remark.said)
    return [Remark(", ".join(said), became, why) for (became, why), said in alike.items()]


def _put_own(translation: Translation, file: Read, said: Mapping[str, Any], args: Arguments) -> None:
    """The run folder, what is saved into it, and the data of fine-tuning."""
    parts = [
        str(file.values[name]) for name in ("workspace", "work_group", "user_name", "exp_name") if name in file.values
    ]
    if parts:
        translation.put("out", "/".join(parts), "workspace, work_group, user_name and exp_name")
        # It saves into its folder whether it is told where or not.
        if args.said("save_interval"):
            translation.put("checkpoint.every", args.get("save_interval"), args.words("save_interval"))
    if said.get("disable_last_saving"):
        translation.put("checkpoint.save_final", False, "disable_last_saving: true")
    elif parts:
        translation.put("checkpoint.save_final", True, "disable_last_saving: false")
    if said.get("auto_continue_train"):
        translation.put("checkpoint.resume", "auto", "auto_continue_train: true")
    if name := said.get("sft_dataset_name"):
        split = said.get("sft_dataset_split") or "train"
        local = Path(str(name)).exists() or str(name).endswith((".json", ".jsonl", ".parquet"))
        files = [str(name) if local else f"hf:{name}:{split}"]
        translation.put("data.files", files, f"sft_dataset_name: {name}")


def _put_preset(translation: Translation, preset: str, args: Arguments, overrides: Mapping[str, Any]) -> None:
    """A model of the presets, with what the run says of it laid over."""
    words, preset = f"model: {preset}.yaml", preset.lower()
    rest = dict(translation.settings)
    translation.settings.clear()
    if "out" in rest:
        translation.put("out", rest.pop("out"), translation.origins["out"])
    translation.put("model.path", f"preset:{PRESETS[preset]}", words)
    laid: dict[str, Any] = {}
    for key in overrides:
        name, _ = name_of(key)
        if name is None or not args.said(name) or name not in (*ARGUMENTS, *_SIZES):
            continue
        if name in CONFIG_KEYS:
            laid[CONFIG_KEYS[name]] = args.get(name)
        elif name != "moe_router_load_balancing_type":
            why = "It cannot be laid over a preset. Name the folder of Primus' model files with --models."
            translation.remark(args.words(name), "not at all", why)
    if laid:
        translation.put("model.config", laid, "overrides of the model")
    translation.put("model.init", "random", words)
    translation.settings.update(rest)
    begins = max((start for start in INEXACT if preset.startswith(start)), key=len, default=None)
    exact = f" {INEXACT[begins]}." if begins else ""
    why = f"No such file is at hand: the preset is the model as its own config.json has it.{exact}"
    translation.remark(words, "otherwise", why)
