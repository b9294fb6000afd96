"""Gradients of every tensor in float64, over two tensor-parallel ranks and on one: they differ by rounding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import VOCAB, build_model_folder
from ranks.tiny_families.delta_net import KIMI_LAYERS

# Without experts, whose router computes in float32.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]},
    "kimi_linear": {"layer_types": KIMI_LAYERS, "mlp_layer_types": ["dense"] * 4},
    "olmo_hybrid": {"num_hidden_layers": 2},
    "falcon_h1": {"num_hidden_layers": 2},
    "mamba": {"num_hidden_layers": 2},
}


@pytest.mark.thorough_cases("mamba", "olmo_hybrid", "qwen3_5_text", "qwen3_next")
@pytest.mark.parametrize("family", MODELS)
def test_tensor_parallel_gradients(family: str, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", family, **MODELS[family])
    settings = {"model": model, "saved": tmp_path / "saved", "vocab_size": VOCAB, "lengths": [25, 1, 14]}
    one_rank.run("ranks.gradient_tasks.gradients", **settings)
    for sp in (False, True):
        results = two_ranks.run("ranks.gradient_tasks.gradients", tp=2, sp=sp, **settings)
        worst = max(results, key=lambda name: results[name])
        assert len(results) > 20
        assert results[worst] < 1e-12
