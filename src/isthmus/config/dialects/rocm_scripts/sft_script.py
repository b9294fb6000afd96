"""``03-train-dense.sh`` of Qwen3-0.6B and Llama-3.2-1B: supervised fine-tuning in ROCm's Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.dialects.rocm_scripts.script_run import (
    TIME,
    ScriptRun,
    add_remarks,
    name_of_all_nodes,
    read_world,
    script_run,
)
from isthmus.config.dialects.script_variables import Variables
from isthmus.config.dialects.translation import Translation
from isthmus.config.inherit import read_settings
from isthmus.config.model_file import read_model
from isthmus.config.presets import config_path

MODELS = ("qwen3-0.6b", "llama3.2-1b")
"""Folders of the scripts; the presets have the same names."""
_SIZES = {
    "train.steps": "TRAIN_ITERS",
    "train.global_batch_size": "GBS",
    "train.micro_batch_size": "MBS",
    "data.seq_length": "SEQ_LENGTH",
    "optim.schedule_steps": "LR_DECAY_ITERS",
    "checkpoint.every": "SAVE_INTERVAL",
    "logging.every": "LOG_INTERVAL",
}
_SHAPES = {"NUM_QUERY_GROUPS": "num_key_value_heads", "KV_CHANNELS": "head_dim"}


def read_sft(model: str, v: Variables) -> ScriptRun:
    t = Translation(recipe="sft")
    preset = f"preset:{model}-sft"
    for setting in read_settings(config_path(preset), v.errors.append):
        if setting.value != {} and setting.key != ("recipe",):
            t.put(".".join(setting.key), setting.value, preset)
    for name, variable in _SIZES.items():
        if v.has(variable):
            t.put(name, v.integer(variable, 1), v.origin(variable))
    _put_weights(t, v, model)
    _put_learning_rate(t, v)
    t.put("parallel.tp", v.integer("TP", 8), v.origin("TP", "8 (base_tp8_pp1)"))
    t.put("parallel.pp", v.integer("PP", 1), v.origin("PP", 1))
    data = v.text("DATA_PATH", f"{v.text('DATA_DIR', f'{model}/data')}/sft")
    t.put("data.files", data.split(), v.origin("DATA_PATH", f"{data}, which 02-generate.sh writes"))
    add_remarks(t, v, "sft")
    t.world = read_world(v, None, t)
    log_folder = v.text("LOG_DIR", f"experiment/{model}-sft-{TIME}")
    t.put("out", f"{name_of_all_nodes(log_folder, t.world)}/run", v.origin("LOG_DIR", log_folder))
    return script_run(f"{model}/03-train-dense.sh", t, v, log_folder, f"{log_folder}/train.log")


def _put_weights(t: Translation, v: Variables, model: str) -> None:
    folder = v.text("HF_MODEL_DIR", "")
    if folder:
        t.put("model.path", folder, v.origin("HF_MODEL_DIR"))
    for name in ("INIT_CHECKPOINT", "BASE_CKPT_DIR"):
        if (checkpoint := v.text(name, "")) and not _is_checkpoint(Path(checkpoint)):
            t.remark(
                v.origin(name),
                "different",
                "no checkpoint is there, and none is written: each rank reads its part of the Hugging Face weights, "
                "for any TP and PP",
            )
        elif checkpoint:
            v.refuse(
                name,
                "training starts from a Hugging Face folder. Convert the checkpoint with isthmus convert "
                f"{checkpoint} {checkpoint}-hf --to hf, then set HF_MODEL_DIR={checkpoint}-hf and leave {name} out; "
                "03-train-dense.sh does that",
            )
    config = _config(folder, model)
    for name, key in _SHAPES.items():
        if not v.has(name):
            continue
        if v.integer(name, 1) != config.get(key, v.integer(name, 1)):
            v.refuse(name, f"config.json has {key}={config[key]}, which the weights fit. Leave {name} out")
        t.remark(v.origin(name), "different", "it is read from config.json")


def _put_learning_rate(t: Translation, v: Variables) -> None:
    rate, least = v.positive("LR"), v.positive("MIN_LR")
    if rate is not None:
        t.put("optim.lr", rate, v.origin("LR"))
        t.put("optim.min_lr", rate / 10, "a tenth of LR")
    if least is not None:
        t.put("optim.min_lr", least, v.origin("MIN_LR"))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "latest_checkpointed_iteration.txt").is_file() or any(folder.glob("mp_rank_*"))


def _config(folder: str, model: str) -> Mapping[str, Any]:
    """Keys of ``config.json``; empty if the folder is not on this machine."""
    if not folder:
        return read_model(f"preset:{model}")
    file = Path(folder) / "config.json"
    return read_model(str(file)) if file.is_file() else {}
