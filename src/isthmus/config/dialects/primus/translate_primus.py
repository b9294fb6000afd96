"""Translates a Primus experiment to the settings of a run."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments
from isthmus.config.dialects.megatron.known_args import ARGUMENTS, entries, is_neutral, name_of, near
from isthmus.config.dialects.megatron.translate_megatron import MegatronTranslation, translate_arguments
from isthmus.config.dialects.primus.primus_files import CHECKOUT, PrimusFile, find_file, read_file
from isthmus.config.dialects.translation import OptionRemark, Translation, World, grouped
from isthmus.config.yaml_text import read_value
from isthmus.errors import UsageError

_KEYS: Mapping[str, Any] = read_value(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
_PRESETS = {name.lower(): name.lower().replace("_", "-") for name in _KEYS["presets"].split()}
_RUN_FOLDER = ("work_group", "user_name", "exp_name", "workspace")
"""Keys of the run folder, which Primus requires."""
_RUN_KEYS = {
    *_RUN_FOLDER,
    *"auto_continue_train disable_last_saving disable_tensorboard sft_dataset_name sft_dataset_split hf_path".split(),
}
"""Keys that are translated in this file, not with Megatron-LM's."""
_MODULE_KEYS = ("framework", "config", "model", "overrides", "name")


def translate_experiment(path: Path, models: Path | None = None) -> MegatronTranslation:
    """Translate an experiment, or its part with ``model`` and ``overrides``; ``models``: folder with model files."""
    file = read_file(path)
    module, module_name = _module(file)
    args, remarks = Arguments(), list[OptionRemark]()
    config = str(module.get("config") or "pre_trainer.yaml")
    sft = "sft" in config or "post" in module_name
    values: dict[str, Any] = {}
    _add_defaults(args, values, config, sft, path, models, remarks)
    model, preset = _model(file, module, models)
    unknown_keys: list[str] = []
    if model is not None:
        for key, value in model.values.items():
            if key not in values:
                values[key] = value
                _set(args, key, value, f"{model.path.name}: {_line(key, value)}", remarks, unknown_keys)
    overrides = {key: value for key, value in module.items() if key not in _MODULE_KEYS}
    overrides |= module.get("overrides") or {}
    for key, value in overrides.items():
        values[key] = value
        _set(args, key, value, _line(key, value), remarks, None)
    if unknown_keys and model is not None:
        words = f"{model.path.name}: {', '.join(unknown_keys)}"
        remarks.append(OptionRemark(words, "unsupported", "Neither Megatron-LM nor Primus has these keys."))
    if sft:
        args.set("sft", True, f"config: {config}")
    name = str(file.values.get("exp_name") or path.stem)
    weights = values.get("hf_path")
    if preset is None and weights is None and not args.has("num_layers"):
        raise UsageError(f"{path} names no model. Add `model: NAME.yaml`, or the model's keys.")
    translated = translate_arguments(args, World(), name, model=preset is None and weights is None)
    _put_primus_keys(translated.translation, file, values, args)
    if weights is not None:
        translated.translation.put("model.path", str(weights), f"hf_path: {weights}")
    elif preset is not None:
        _put_preset(translated.translation, preset, args, overrides)
    translated.translation.remarks[:0] = grouped(remarks)
    return translated


def _module(file: PrimusFile) -> tuple[dict[str, Any], str]:
    modules = file.values.get("modules")
    if modules is None:
        # A file with one module's keys; read_file has applied its overrides.
        part = {key: value for key, value in file.values.items() if key not in (*_RUN_FOLDER, "platform")}
        if not isinstance(part.get("overrides") or {}, dict):
            raise UsageError(f"{file.path}  overrides  must be a mapping.")
        return part, ""
    trainers = {name: part for name, part in modules.items() if "trainer" in name} if isinstance(modules, dict) else {}
    if len(trainers) != 1:
        raise UsageError(
            f"{file.path}  modules  has {len(trainers)} modules with trainer in their names, expected one."
        )
    ((name, part),) = trainers.items()
    if not isinstance(part, dict) or not isinstance(part.get("overrides") or {}, dict):
        raise UsageError(f"{file.path}  modules.{name}  must be a mapping with framework, config, model and overrides.")
    if (framework := part.get("framework", "megatron")) != "megatron":
        raise UsageError(f"{file.path}  framework: {framework}  is not supported; use an experiment of megatron.")
    return part, name


def _add_defaults(
    args: Arguments,
    defaults: dict[str, Any],
    config: str,
    sft: bool,
    path: Path,
    models: Path | None,
    remarks: list[OptionRemark],
) -> None:
    defaults_file = find_file(config, "modules", path, models)
    if defaults_file is not None:
        values, where = read_file(defaults_file).values, defaults_file.name
    else:
        stem = Path(config).stem
        values, where = (
            _KEYS["defaults"].get(stem, _KEYS["defaults"]["sft_trainer" if sft else "pre_trainer"]),
            f"{stem}, default of Primus",
        )
    defaults.update(values)
    for key, value in values.items():
        _set(args, key, value, f"{where}: {_line(key, value)}", remarks, [], implicit=True)


def _model(file: PrimusFile, module: Mapping[str, Any], models: Path | None) -> tuple[PrimusFile | None, str | None]:
    """The model's file, or the name of a preset."""
    if (model := module.get("model")) is None:
        return None, None
    if (model_file := find_file(str(model), "models", file.path, models)) is not None:
        return read_file(model_file), None
    name = str(model).removesuffix(".yaml").lower()
    if name in _PRESETS:
        return None, Path(str(model)).stem if str(model).endswith((".yaml", ".yml")) else str(model)
    near_names = difflib.get_close_matches(name, _PRESETS, n=1)
    guess = f" Did you mean {near_names[0]}?" if near_names else ""
    raise UsageError(
        f"{file.path}  model: {model}  was not found beside the experiment. Give its folder with --models, or a "
        f"checkout of Primus in {CHECKOUT}.{guess}"
    )


def _set(
    args: Arguments,
    key: str,
    value: Any,
    source: str,
    remarks: list[OptionRemark],
    unknown_keys: list[str] | None,
    *,
    implicit: bool = False,
) -> None:
    """``unknown_keys`` collects unknown keys of Primus' own files; with None they are errors."""
    if (primus_key := _primus_key(key)) is not None:
        status, why, neutral = primus_key
        on = not is_neutral(value, neutral) if neutral else bool(value)
        on = on and (not isinstance(value, dict) or bool(value.get("enabled")))
        if status == "refused" and on:
            args.errors.append(f"{source}  {why}")
        elif status != "refused" and on and unknown_keys is None:
            remarks.append(OptionRemark(source, status, why))
        return
    if key in _RUN_KEYS:
        return
    name, fixed = name_of(key)
    if name is None:
        if unknown_keys is not None:
            unknown_keys.append(key)
            return
        tables = (_KEYS[status].values() for status in ("different", "unsupported", "refused"))
        names = [name for table in tables for patterns in table for name, _ in entries(patterns)]
        guess = near(key) or next(iter(difflib.get_close_matches(key, names, n=1)), None)
        is_typo = guess is not None and difflib.SequenceMatcher(None, key, guess).ratio() > 0.85
        if value is False and not is_typo:
            remarks.append(OptionRemark(source, "ignored", "Isthmus does not know this switch, and it is off."))
            return
        args.errors.append(
            f"{key}  is not a key of Primus or Megatron-LM" + (f" (did you mean {guess}?)" if guess else "")
        )
        return
    if fixed is not None:
        value = fixed if value else None
    # No remarks on the defaults in Primus' own files.
    args.set(name, value, source, implicit=implicit or unknown_keys is not None)


def _line(key: str, value: Any) -> str:
    return f"{key}: {json.dumps(value) if value is None or isinstance(value, bool | list | dict) else value}"


def _primus_key(key: str) -> tuple[Any, str, str] | None:
    """Status (or ``refused``), reason and value without effect of a key that only Primus has."""
    for status in ("different", "unsupported", "refused"):
        for why, patterns in _KEYS[status].items():
            for pattern, neutral in entries(patterns):
                if fnmatchcase(key, pattern) and key not in ARGUMENTS:
                    return status, why, neutral
    return None


def _put_primus_keys(translation: Translation, file: PrimusFile, values: Mapping[str, Any], args: Arguments) -> None:
    """The run folder, checkpoints and the data of fine-tuning."""
    parts = [
        str(file.values[name]) for name in ("workspace", "work_group", "user_name", "exp_name") if name in file.values
    ]
    if parts:
        translation.put("out", "/".join(parts), "workspace, work_group, user_name and exp_name")
        # Primus always saves into its run folder.
        if args.has("save_interval"):
            translation.put("checkpoint.every", args.get("save_interval"), args.source("save_interval"))
    if values.get("disable_last_saving"):
        translation.put("checkpoint.save_final", False, "disable_last_saving: true")
    elif parts:
        translation.put("checkpoint.save_final", True, "disable_last_saving: false")
    if (disabled := values.get("disable_tensorboard")) is not None:
        translation.put(
            "logging.to", [] if disabled else ["tensorboard"], f"disable_tensorboard: {json.dumps(disabled)}"
        )
    if values.get("auto_continue_train"):
        translation.put("checkpoint.resume", "auto", "auto_continue_train: true")
    if name := values.get("sft_dataset_name"):
        split = values.get("sft_dataset_split") or "train"
        local = Path(str(name)).exists() or str(name).endswith((".json", ".jsonl", ".parquet"))
        files = [str(name) if local else f"hf:{name}:{split}"]
        translation.put("data.files", files, f"sft_dataset_name: {name}")


def _put_preset(translation: Translation, preset: str, args: Arguments, overrides: Mapping[str, Any]) -> None:
    words, preset = f"model: {preset}.yaml", preset.lower()
    rest = dict(translation.settings)
    translation.settings.clear()
    if "out" in rest:
        translation.put("out", rest.pop("out"), translation.origins["out"])
    translation.put("model.path", f"preset:{_PRESETS[preset]}", words)
    changed: dict[str, Any] = {}
    for key in overrides:
        name, _ = name_of(key)
        if name is None or not args.has(name) or name not in (*ARGUMENTS, "vocab_size"):
            continue
        if name in _KEYS["config_keys"]:
            changed[_KEYS["config_keys"][name]] = args.get(name)
        elif name != "moe_router_load_balancing_type":
            why = "It cannot override a preset. Give the folder of Primus' model files with --models."
            translation.remark(args.source(name), "unsupported", why)
    if changed:
        translation.put("model.config", changed, "overrides of the model")
    translation.put("model.init", "random", words)
    translation.settings.update(rest)
    prefix = max((start for start in _KEYS["inexact"] if preset.startswith(start)), key=len, default=None)
    exact = f" {_KEYS['inexact'][prefix]}." if prefix else ""
    why = f"The file was not found: the preset is the model of its Hugging Face config.json.{exact}"
    translation.remark(words, "different", why)
