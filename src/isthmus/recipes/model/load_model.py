"""Load a model folder as a Megatron-Core decoder, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from isthmus.config.load import load_config
from isthmus.config.presets import is_model_file
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.platforms.detect import detect
from isthmus.recipes.model.rank_model import RankModel, join_and_build
from isthmus.recipes.plan.layout_checks import check_fsdp_precision, check_fsdp_torch
from isthmus.recipes.plan.model_plan import ModelPlan, check_precision, open_run_model, plan_model


def load_model(hf_dir: Path | str, parallel: dict[str, int] | None = None, *, precision: str = "fp32") -> Any:
    """Load a Hugging Face model folder as a Megatron-Core decoder, for evaluation.

    For a training loop of your own use :class:`isthmus.AutoBridge`.

    Args:
        hf_dir: folder with config.json and safetensors, or a model id on the Hub.
        parallel: ``tp``, ``pp`` and so on, for the ranks of the environment (one without torchrun).
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.

    Returns:
        This rank's ``Decoder``, or with ``fsdp`` its wrapper.

    Raises:
        UsageError: the layout does not fit or has virtual stages, or ``hf_dir`` is a preset, which has no weights.
    """
    if (vpp := (parallel or {}).get("vpp", 1)) != 1:
        raise UsageError(f"vpp={vpp} is for training only. Leave it out, or use isthmus.AutoBridge.")
    (stage,) = build_from_folder(hf_dir, parallel, precision=precision).stages
    return stage.eval()


def build_from_folder(
    hf_dir: Path | str,
    parallel: dict[str, Any] | None = None,
    *,
    precision: str = "fp32",
    training: bool = False,
    trust_remote_code: bool = False,
) -> RankModel:
    """Build this rank's part of the model in a folder; arguments and errors are those of :func:`load_model`.

    ``training`` adds the data-parallel wrapper with gradient buffers, for :class:`isthmus.engine.step.Stepper`.
    """
    config, plan = plan_from_folder(hf_dir, parallel, precision=precision, trust_remote_code=trust_remote_code)
    return join_and_build(config, plan, detect(), precision, training=training)


def plan_from_folder(
    hf_dir: Path | str, parallel: dict[str, Any] | None, *, precision: str, trust_remote_code: bool
) -> tuple[RunConfig, ModelPlan]:
    """Check model, layout and precision; arguments are those of :func:`build_from_folder`."""
    check_is_folder(hf_dir)
    # With sequence parallelism tp would have to divide the number of tokens.
    layout = {f"parallel.{name}": size for name, size in ({"sp": False} | (parallel or {})).items()}
    flags = {"model": str(hf_dir), "data": ["unused"], "out": "unused", "train.precision": precision}
    config = load_config("pretrain", None, flags=flags | layout | {"model.trust_remote_code": trust_remote_code})
    check_precision(detect(), precision)
    plan = plan_model(open_run_model(config), config)
    check_fsdp_precision(config.parallel, precision)
    check_fsdp_torch(config.parallel)
    return config, plan


def check_is_folder(hf_dir: Path | str) -> None:
    """Raise UsageError for a preset, which has no weights."""
    if is_model_file(str(hf_dir)):
        raise UsageError(f"{hf_dir} is a model without weights. Give a folder, or an id on the Hub.")


@torch.no_grad()
def model_logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Float32 logits [S, V] of one sequence, int64 [S]; the model has one pipeline stage."""
    from isthmus.data.batching.packed_batch import PackedBatch

    batch = PackedBatch.for_inference([input_ids.to(next(model.parameters()).device)])
    logits: torch.Tensor = model(batch)
    return logits.float().cpu()
