"""Configs of pretraining for programs of NVIDIA's Megatron Bridge."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict

from isthmus.config.load import load_config
from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.errors import UsageError
from isthmus.recipes.model.auto_bridge import ModelProvider

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

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """A provider also sets the layout: the weights are those of its model."""
        if isinstance(value, ModelProvider):
            super().__setattr__("parallel", ParallelConfig(**value.layout()))
            value = ModelConfig(path=value.bridge.hf_dir, trust_remote_code=value.bridge.trust_remote_code)
        super().__setattr__(name, value)


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
