"""The run record: what shapes the result of a run, in its folder and in each checkpoint.

It is compared when a run is resumed. Files are identified by their content: on another machine, paths differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform as python_platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import isthmus
from isthmus.config.schema import RunConfig
from isthmus.config.schema.resume_rules import RESUME_RULES
from isthmus.families.architecture import PREFIXES, Architecture
from isthmus.families.blocks.rotary import QueryScaling, RopeScaling
from isthmus.hf.tensors.tensor_fingerprint import fingerprint_of
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.platforms import rank_env
from isthmus.recipes.data.data_sources import tokenizer_record
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.plan.validation import RunContext

_PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers")
_VARIABLES = tuple(f"{name}_" for name in "NCCL RCCL GLOO TORCH PYTORCH CUDA HIP HSA ROCR GPU OMP MKL KMP".split())
"""Prefixes of environment variables that change speed or results."""
_PROBE = "Hello, world! 3.14 + 2026\n\tdef f(x):  return x**2  # \u00e9\u00df\u4f60\u597d\u0416 \U0001f600 don't <b>"
"""Its tokens tell tokenizers with the same vocabulary and other merges or normalization apart."""


def run_record(context: RunContext) -> dict[str, Any]:
    """The record of a run; reads some bytes of each tensor of the model."""
    config, plan = context.config, context.plan
    settings = config.model_dump(mode="json")
    values = {name: _value(settings, name) for name in RESUME_RULES}
    values |= {
        "train.precision": context.precision,
        "train.attention_dropout": plan.dropout.attention,
        "train.hidden_dropout": plan.dropout.hidden,
    }
    if config.lora.rank is not None:
        values["lora.alpha"] = config.lora.alpha_of(config.lora.rank)
    folders = {folder for folder in (context.tokenizer.folder, plan.source.path) if folder is not None}
    code = sorted(file for folder in folders for file in folder.glob("*.py")) if config.model.trust_remote_code else []
    record: dict[str, Any] = {
        "isthmus": isthmus.__version__,
        "began_from": config.checkpoint.resume,
        "settings": values,
        "model": _model_identity(plan, config, config.model.init),
        "teacher": None if plan.teacher is None else _model_identity(plan.teacher, config, config.distill.teacher_init),
        "adapter": None if plan.existing is None else plan.existing.fingerprint(),
        "tokenizer": _tokenizer_identity(context.tokenizer),
        "trust_remote_code": config.model.trust_remote_code,
        "remote_code": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in code},
        "changes": [],
    }
    return dict(json.loads(json.dumps(record)))


def _value(settings: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return settings[section][key] if key else settings[section]


def _model_identity(plan: ModelPlan, config: RunConfig, init: str) -> dict[str, Any]:
    if init == "hf":
        weights = fingerprint_of(plan.source.tensors)
    else:  # frozen random weights are not in the checkpoint
        weights = f"random, train.seed={config.train.seed}" if plan.frozen else "random"
    return {"name": str(plan.source), "architecture": _architecture_record(plan.architecture), "weights": weights}


def _architecture_record(arch: Architecture) -> dict[str, Any]:
    """The settings, those of a block under its prefix; None for a block that the model does not have."""
    record: dict[str, Any] = dict.fromkeys(PREFIXES)
    for name, value in arch.settings.items():
        prefix, _, field_name = name.rpartition(".")
        if prefix and record[prefix] is None:
            record[prefix] = {}
        section = record[prefix] if prefix else record
        section[field_name] = asdict(value) if isinstance(value, RopeScaling | QueryScaling) else value
    return record


def _tokenizer_identity(tokenizer: Tokenizer) -> dict[str, str]:
    tokens = json.dumps(tokenizer.encode(_PROBE) if tokenizer.folder is not None else tokenizer.vocab_size)
    return {**tokenizer_record(tokenizer), "probe": hashlib.blake2b(tokens.encode(), digest_size=16).hexdigest()}


def run_environment(context: RunContext) -> dict[str, Any]:
    """Machine, versions and command of a start of the run, for people who compare runs."""
    ranks, here = rank_env.world_size(), rank_env.local_world_size()
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": socket.gethostname(),
        "system": python_platform.platform(),
        "hardware": context.platform.describe(),
        "platform": context.platform.name,
        "precision": context.precision,
        "ranks": ranks,
        "machines": max(1, ranks // max(1, here)),
        **versions(),
        "command": _command(),
        **speed_variables(),
    }


def _command() -> str:
    """The command as the user typed it: ranks of ``--nproc`` are started with other words before the same arguments."""
    program, arguments = Path(sys.argv[0]), sys.argv[1:]
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", program.parent.name, *arguments])
    is_isthmus = rank_env.stop_file() is not None or program.name == "isthmus"
    return shlex.join(["isthmus" if is_isthmus else sys.argv[0], *arguments])


def speed_variables() -> dict[str, str]:
    """The environment variables that change speed or results."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def versions() -> dict[str, str]:
    """Versions of Isthmus, Python and the packages that compute."""
    numbers = {package: version(package) for package in _PACKAGES}
    return {"isthmus": isthmus.__version__, "python": python_platform.python_version(), **numbers}
