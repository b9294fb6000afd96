"""Checkpoints of hybrid models load in Megatron-Core's own class."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.convert.transfer import convert
from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder


@pytest.mark.thorough_cases("2-log_unexpected")
@pytest.mark.parametrize(("tp", "strict"), [(1, "raise_all"), (2, "log_unexpected")])
def test_the_mamba_model_of_megatron_core_loads_it(
    tp: int, strict: str, worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    """Mamba-2, attention and MLP layers: all names, shapes and values."""
    blocks = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    # Megatron-Core's convolution has four taps.
    settings = {"layers_block_type": blocks, "conv_kernel": 4, "tie_word_embeddings": False}
    model = build_model_folder(tmp_path / "hf", "nemotron_h", **settings)
    convert(model, tmp_path / "megatron")
    results = worlds[tp].run(
        "ranks.hybrid_core_model.load_into_mamba_model",
        model=model,
        checkpoint_folder=tmp_path / "megatron" / "release",
        strict=strict,
        tp=tp,
    )
    assert results["max_difference"] == 0 and results["tensors"] == 2 * 9 + 3 + 3 + 3
