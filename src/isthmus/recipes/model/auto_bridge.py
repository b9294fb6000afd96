"""Hugging Face weights in a live Megatron-Core model, and back, for programs with their own training loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.config.schema.model import ModelConfig
from isthmus.convert.open_model import checkpoint_config
from isthmus.convert.transfer import ConversionResult, convert
from isthmus.engine.parallel.ddp import sum_tp_grads
from isthmus.errors import UsageError
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.recipes.model.hf_export import export_hf, iterate_full_weights
from isthmus.recipes.model.load_model import build_from_folder, check_is_folder, plan_from_folder
from isthmus.recipes.model.model_source import open_source
from isthmus.recipes.model.rank_model import RankModel


class AutoBridge:
    """Connects a Hugging Face model folder with live Megatron-Core models and Megatron checkpoints.

    ``to_megatron_model``, ``save_hf_pretrained`` and ``export_weights`` are collectives: every rank of the environment
    calls them. Without torchrun there is one rank.
    """

    def __init__(self, hf_dir: Path | str, *, trust_remote_code: bool = False) -> None:
        """See :meth:`from_hf_pretrained`."""
        check_is_folder(hf_dir)
        self.hf_dir: str = str(hf_dir)
        self.trust_remote_code: bool = trust_remote_code
        source = open_source(ModelConfig(path=self.hf_dir, trust_remote_code=trust_remote_code))
        self.config: dict[str, Any] = source.config
        """The contents of config.json."""
        self.family: Family = family_for(self.config)
        self._folder = source.path
        self._model: RankModel | None = None

    @classmethod
    def from_hf_pretrained(cls, hf_dir: Path | str, *, trust_remote_code: bool = False) -> AutoBridge:
        """Open a model folder without reading its weights.

        Args:
            hf_dir: folder with config.json and safetensors, or a model id on the Hub.
            trust_remote_code: also download Python files with a model id. The weight mapping never runs them.

        Raises:
            MissingInput, DataError: the folder or its config.json is missing or malformed.
            UsageError: the model type has no family, see :func:`isthmus.register_family`.
        """
        return cls(hf_dir, trust_remote_code=trust_remote_code)

    def to_megatron_model(
        self, parallel: dict[str, Any] | None = None, *, precision: str = "fp32", wrap_with_ddp: bool = False
    ) -> list[Any]:
        """Build this rank's part of the model and read its slices of the weights.

        Args:
            parallel: ``tp``, ``pp``, ``vpp``, ``cp``, ``ep``, ``etp``, ``sp``, ``fsdp``; data parallelism uses the
                remaining ranks. A second call ends the models of other layouts in this process.
            precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
            wrap_with_ddp: add Megatron-Core's data-parallel wrapper, for its distributed optimizer and
                :class:`isthmus.engine.step.Stepper`. Without it a PyTorch optimizer can train the parameters on one
                data-parallel rank without pp: the backward pass sums gradients over tp ranks where necessary.

        Returns:
            The pipeline stages of this rank as in Megatron-Core: one ``Decoder``, or ``vpp`` of them.

        Raises:
            UsageError: the layout or precision does not fit the model or the number of ranks.
            DataError: the weights do not match config.json.
        """
        self._model = build_from_folder(
            self.hf_dir, parallel, precision=precision, training=wrap_with_ddp, trust_remote_code=self.trust_remote_code
        )
        if not wrap_with_ddp and not self._model.plan.parallel.fsdp:
            for stage in self._model.stages:
                sum_tp_grads(stage)
        return self._model.stages

    def to_megatron_provider(self) -> ModelProvider:
        """The same with the layout as attributes, as in Megatron Bridge."""
        return ModelProvider(self)

    def save_hf_pretrained(
        self, model: Any, path: Path | str, *, dtype: torch.dtype | None = None, replace: bool = False
    ) -> None:
        """Write a Hugging Face folder: weights, config, tokenizer and other small files of the original folder.

        Args:
            model: what ``to_megatron_model`` returned.
            path: folder to create. It appears when it is complete.
            dtype: of all tensors; default: each tensor's dtype in the original folder.
            replace: replace an existing folder.

        Raises:
            UsageError: another bridge built the model.
            OutputExists, OutputInUse, NoSpace, IOFailure: the folder exists or cannot be written.
        """
        export_hf(self._check_model(model), Path(path), None, dtype=dtype, replace=replace)

    def export_weights(
        self, model: Any, *, dtype: torch.dtype | None = None, rank0_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) for every weight, for example to update an inference engine.

        Slices of all parallel ranks are exchanged in buckets of 256 MiB. A rank needs memory for three buckets besides
        the model, or for two copies of a larger tensor (of the experts of a layer, if the files have them stacked).
        Experts come last. Every rank must iterate to the end.

        Args:
            model: what ``to_megatron_model`` returned.
            dtype: of all tensors; default: each tensor's dtype in the original folder.
            rank0_only: rank 0 yields the tensors; the others take part and yield nothing.

        Raises:
            UsageError: another bridge built the model.
        """
        return iterate_full_weights(self._check_model(model), dtype=dtype, rank0_only=rank0_only)

    @classmethod
    def import_ckpt(cls, hf_dir: Path | str, megatron_path: Path | str, **options: Any) -> ConversionResult:
        """Convert a Hugging Face folder into a Megatron checkpoint, without building the model.

        ``options`` and errors are those of :func:`isthmus.convert`. The default format, torch_dist, loads in any
        layout. One process does it.
        """
        return convert(hf_dir, megatron_path, **{"to": "torch_dist"} | options)

    def export_ckpt(self, megatron_path: Path | str, hf_path: Path | str, **options: Any) -> ConversionResult:
        """Convert a Megatron checkpoint of this model into a Hugging Face folder, without building the model.

        A checkpoint without a config, such as one of Megatron-LM, is read with the config of this bridge. ``options``
        and errors are those of :func:`isthmus.convert`. One process does it.
        """
        if checkpoint_config(Path(megatron_path)) is None:
            options = {"hf_like": self._folder} | options
        return convert(megatron_path, hf_path, "hf", **options)

    def _check_model(self, model: Any) -> RankModel:
        stages = list(model) if isinstance(model, list | tuple) else [model]
        if self._model is None or len(stages) != len(self._model.stages):
            raise UsageError("this bridge has not built this model. Give what its to_megatron_model returned.")
        return replace(self._model, stages=stages)


@dataclass(slots=True)
class ModelProvider:
    """A layout and precision to build a model with, under Megatron-Core's names."""

    bridge: AutoBridge
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32

    def finalize(self) -> None:
        """Raise UsageError if layout or precision do not fit the model or the number of ranks."""
        layout, precision = self.layout(), self._precision()
        code = self.bridge.trust_remote_code
        plan_from_folder(self.bridge.hf_dir, layout, precision=precision, trust_remote_code=code)

    def provide_distributed_model(self, *, wrap_with_ddp: bool = True) -> list[Any]:
        """See :meth:`AutoBridge.to_megatron_model`."""
        return self.bridge.to_megatron_model(self.layout(), precision=self._precision(), wrap_with_ddp=wrap_with_ddp)

    def layout(self) -> dict[str, Any]:
        """The settings of section ``parallel``."""
        return {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "vpp": self.virtual_pipeline_model_parallel_size or 1,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "etp": self.expert_tensor_parallel_size,
            "sp": self.sequence_parallel,
        }

    def _precision(self) -> str:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return names.get(self.params_dtype, str(self.params_dtype))
