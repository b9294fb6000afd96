"""Samples with the same beginning: the layers compute it once, with the same logits and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import VOCAB, build_model_folder
from ranks.tiny_families.delta_net import KIMI_LAYERS
from ranks.tiny_families.gemma4 import SMALL

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 2},
    "kimi_linear": {"layer_types": KIMI_LAYERS, "mlp_layer_types": ["dense"] * 4},
    "falcon_h1": {"num_hidden_layers": 2},
    "lfm2": {},
    "gemma4_text": SMALL | {"enable_moe_block": False},
    "gpt2": {"num_hidden_layers": 2},
    "glm_moe_dsa": {},
}
"""Attention; delta net and latent attention; Mamba; short convolution; keys and inputs of other layers; learned
positions; selected keys and experts, whose router computes in float32.
"""


@pytest.mark.parametrize("family", MODELS)
def test_same_numbers(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", family, **MODELS[family])
    lengths = [9, 1, 12, 5, 7]
    logits, gradients, computed = one_rank.run(
        "ranks.gradient_tasks.prefix_differences", model=model, vocab_size=VOCAB, lengths=lengths, prefix=13
    )
    tolerance = 1e-5 if family == "glm_moe_dsa" else 1e-12
    assert logits < tolerance and gradients < tolerance
    assert computed == (sum(lengths) + 3 * 13) / (sum(lengths) + 5 * 13)


def test_rows_are_shared_by_tensor_parallel_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    """Sequence parallelism has as many rows on each rank: one shared token is computed twice."""
    model = build_model_folder(tmp_path / "model", "qwen3", num_hidden_layers=2)
    lengths = [9, 1, 12, 6, 7]
    logits, gradients, computed = two_ranks.run(
        "ranks.gradient_tasks.prefix_differences",
        model=model,
        vocab_size=VOCAB,
        lengths=lengths,
        prefix=15,
        tp=2,
        sp=True,
    )
    assert logits < 1e-12 and gradients < 1e-12
    assert computed * 110 == 80
