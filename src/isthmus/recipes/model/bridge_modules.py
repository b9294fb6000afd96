"""``megatron.bridge`` of scripts for NVIDIA's Megatron Bridge, where that package is not installed.

``AutoBridge`` is :class:`isthmus.AutoBridge`; ``megatron.bridge.recipes.<family>.<size>`` has ``pretrain_config`` if a
preset has this size. Other names of the package are missing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from typing import Any

from pydantic import ConfigDict

from isthmus.config.load import load_config
from isthmus.config.presets import preset_names
from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.engine.upstream.import_hooks import provide_on_import
from isthmus.errors import UsageError
from isthmus.recipes.model.auto_bridge import AutoBridge, ModelProvider

_NAME = "megatron.bridge"
_SETTINGS = {
    "train_iters": "train.steps",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_length": "data.seq_length",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "lr_warmup_iters": "optim.warmup_steps",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "sequence_parallel": "parallel.sp",
    "dir": "out",
    "data_paths": "data.files",
    "mock": "data.mock",
}
"""Arguments of ``pretrain_config``."""


class PretrainConfig(RunConfig):
    """A config of :func:`isthmus.pretrain` whose ``model`` can be set to what ``to_megatron_provider`` returned."""

    model_config = ConfigDict(frozen=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """A provider also sets the layout: the weights are those of its model."""
        if isinstance(value, ModelProvider):
            super().__setattr__("parallel", ParallelConfig(**value.layout()))
            value = ModelConfig(path=value.bridge.hf_dir, trust_remote_code=value.bridge.trust_remote_code)
        super().__setattr__(name, value)


def provide_bridge() -> None:
    """Answer imports of ``megatron.bridge`` in this process, unless NVIDIA's package is there."""
    presets = {module_name(preset): preset for preset in preset_names("models")}
    packages = {name.rpartition(".")[0] for name in presets}
    for name in (_NAME, f"{_NAME}.recipes", *packages, *presets):
        provide_on_import(name, functools.partial(_find, name, presets.get(name)))


def pretrain_config(preset: str, **arguments: Any) -> PretrainConfig:
    """Pretraining of a preset's model from random weights, on random tokens unless ``data_paths`` are given.

    Raises:
        UsageError: an argument is not one of those that have a setting, or its value does not fit.
    """
    if unknown := sorted(arguments.keys() - _SETTINGS.keys()):
        raise UsageError(
            f"pretrain_config: {', '.join(unknown)} has no setting here. Known arguments: {', '.join(_SETTINGS)}."
        )
    settings = {_SETTINGS[name]: value for name, value in arguments.items() if value is not None}
    defaults = {"train.steps": 100, "data.mock": "data.files" not in settings, "out": f"runs/pretrain-{preset}"}
    flags = {"model.path": f"preset:{preset}", "model.init": "random"} | defaults | settings
    return PretrainConfig.model_validate(load_config("pretrain", None, flags=flags).model_dump())


def module_name(preset: str) -> str:
    """Such as ``megatron.bridge.recipes.llama.llama32_1b`` of llama3.2-1b, ``...qwen.qwen3_600m`` of qwen3-0.6b."""
    size = re.sub(r"-0\.(\d)b", r"-\g<1>00m", preset)
    size = re.sub(r"(?<=-)(\d+)\.(\d+)b", r"\1p\2b", size)
    family = re.match("[a-z]+", preset)
    assert family is not None
    return f"{_NAME}.recipes.{family[0]}.{size.replace('.', '').replace('-', '_')}"


def _find(name: str, preset: str | None, folders: Sequence[str]) -> ModuleSpec | None:
    if PathFinder.find_spec(name, folders) is not None:
        return None
    return spec_from_loader(name, _Loader(preset), is_package=preset is None)


class _Loader(Loader):
    def __init__(self, preset: str | None) -> None:
        self.preset = preset

    def exec_module(self, module: Any) -> None:
        if module.__name__ == _NAME:
            module.AutoBridge = AutoBridge
        elif self.preset is not None:
            module.pretrain_config = functools.partial(pretrain_config, self.preset)
