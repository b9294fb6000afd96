"""Load a model folder as a Megatron-Core decoder, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from isthmus.config.presets import is_model_file
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.platforms.detect import detect
from isthmus.recipes.setup.layout_checks import check_fsdp_precision
from isthmus.recipes.setup.model_plan import check_precision, plan_model
from isthmus.recipes.setup.rank_model import join_and_build


def load_model(hf_dir: Path | str, parallel: dict[str, int] | None = None, *, precision: str = "fp32") -> Any:
    """Load a Hugging Face model folder as a Megatron-Core decoder, for evaluation or a custom training loop.

    Args:
        hf_dir: folder with config.json and safetensors, or a model id on the Hub.
        parallel: ``tp``, ``pp`` and so on, for the ranks of the environment (one without torchrun).
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.

    Returns:
        This rank's ``Decoder``, or with ``fsdp`` its wrapper.

    Raises:
        UsageError: the layout does not fit or has virtual stages, or ``hf_dir`` is a preset, which has no weights.
    """
    if is_model_file(str(hf_dir)):
        raise UsageError(f"{hf_dir} is a model without weights. Give a folder, or an id on the Hub.")
    config = RunConfig.model_validate(
        {
            "recipe": "pretrain",
            "out": "unused",
            "model": {"path": str(hf_dir)},
            "data": {"files": ["unused"]},
            # With sequence parallelism tp would have to divide the length.
            "parallel": {"sp": False, **(parallel or {})},
        }
    )
    if config.parallel.vpp > 1:
        raise UsageError(f"vpp={config.parallel.vpp} is for training only. Leave it out.")
    platform = detect()
    check_precision(platform, precision)
    plan = plan_model(config)
    check_fsdp_precision(config.parallel, precision)
    (stage,) = join_and_build(config, plan, platform, precision, training=False).stages
    return stage.eval()


@torch.no_grad()
def model_logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Float32 logits [S, V] of one sequence, int64 [S]; the model has one pipeline stage."""
    from isthmus.data.batching.packed_batch import PackedBatch

    batch = PackedBatch.for_inference([input_ids.to(next(model.parameters()).device)])
    logits: torch.Tensor = model(batch)
    return logits.float().cpu()
