"""Translates a config of another trainer to the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from isthmus.config.dialects.trainers.axolotl import translate_axolotl
from isthmus.config.dialects.trainers.llama_factory import translate_llama_factory
from isthmus.config.dialects.trainers.ms_swift import translate_swift
from isthmus.config.dialects.trainers.read_config import read_trainer_file
from isthmus.config.dialects.trainers.trainer_config import TrainerConfig, known_keys
from isthmus.config.dialects.trainers.trl import translate_trl
from isthmus.config.dialects.trainers.verl import flattened, translate_verl
from isthmus.config.dialects.translation import Translation, grouped
from isthmus.errors import UsageError

Program = Literal["TRL", "LLaMA-Factory", "axolotl", "ms-swift", "verl"]


@dataclass(frozen=True, slots=True)
class _Source:
    """What a rule gets besides the keys."""

    verb: str | None = None
    is_megatron: bool = False
    """``megatron VERB`` of ms-swift."""
    dataset_info: Path | None = None


_RULES: Mapping[Program, Callable[[TrainerConfig, _Source], None]] = {
    "TRL": lambda keys, source: translate_trl(keys, source.verb),
    "LLaMA-Factory": lambda keys, source: translate_llama_factory(keys, source.dataset_info),
    "axolotl": lambda keys, _: translate_axolotl(keys),
    "ms-swift": lambda keys, source: translate_swift(keys, source.verb, megatron=source.is_megatron),
    "verl": lambda keys, _: translate_verl(keys),
}
_SMALLEST: Mapping[Program, Mapping[str, Any]] = {
    "TRL": {"model_name_or_path": "m", "dataset_name": "d.json"},
    "LLaMA-Factory": {"model_name_or_path": "m", "dataset": "d.json"},
    "axolotl": {"base_model": "m", "datasets": [{"path": "d.json"}], "adapter": "lora"},
    "ms-swift": {"model": "m", "dataset": ["d.json"]},
    "verl": {
        "actor_rollout_ref.model.path": "m",
        "data.train_files": "d.parquet",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
    },
}
"""A config of each program."""
_DATA_KEYS = (
    *("dataset", "dataset_name", "datasets", "pretraining_dataset", "dataset_mixture", "dataset_mixer"),
    "data.train_files",
)
"""Keys that ``data`` replaces."""


def translate_trainer(
    program: Program,
    path: Path,
    *,
    nproc: int | None = None,
    dataset_info: Path | None = None,
    recipe: str | None = None,
    data: tuple[str, ...] = (),
) -> Translation:
    """Translate a config file or the command of a script; each key is mapped, ignored with a remark, or an error.

    Args:
        program: whose config it is.
        path: YAML, JSON or a shell script; that of verl is run, see :func:`read_trainer_file`.
        nproc: ranks of the run, which multiply the batch of a rank; None: those of the script, or 1.
        dataset_info: dataset_info.json of LLaMA-Factory, which tells the files of its data sets.
        recipe: the verb of TRL or ms-swift, if the file is a config and does not have it.
        data: files that replace the data sets of the config.

    Raises:
        UsageError: keys without an equal setting, all in one error.
    """
    file = read_trainer_file(path, program)
    values = flattened(file.values) if program == "verl" else dict(file.values)
    if data:
        replaced = [name for name in _DATA_KEYS if name in values]
        values = {name: value for name, value in values.items() if name not in replaced}
        values |= _data_values(program, data)
    keys = TrainerConfig(program, values, nproc or file.nproc)
    _RULES[program](keys, _Source(recipe or file.verb, file.program == "megatron", dataset_info))
    keys.translate_rest()
    translation = keys.translation
    for other in file.not_run:
        translation.remark(other, "different", "It was not run, and the script took it as failed.")
    translation.settings.setdefault("out", f"runs/{path.stem}")
    translation.origins.setdefault("out", f"the name of {path.name}")
    translation.remarks = grouped(translation.remarks)
    return translation


def translate_option(name: str, value: str) -> dict[str, Any]:
    """The settings of one option of any program, by dotted name; empty if it has none."""
    for program in get_args(Program):
        if name not in known_keys(program):
            continue
        keys = TrainerConfig(program, {**_SMALLEST[program], name: value}, 1)
        try:
            _RULES[program](keys, _Source())
            keys.translate_rest()
        except UsageError:
            continue
        origin = f"{name}: "
        return {
            setting: new
            for setting, new in keys.translation.settings.items()
            if keys.translation.origins[setting].startswith(origin)
        }
    return {}


def _data_values(program: Program, data: tuple[str, ...]) -> dict[str, object]:
    """``data`` as the program writes it."""
    if program == "verl":
        return {"data.train_files": list(data)}
    if program == "TRL":
        return {"datasets": [{"path": file} for file in data]}
    return {"datasets": [{"path": file} for file in data]} if program == "axolotl" else {"dataset": list(data)}
