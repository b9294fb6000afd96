"""The memory estimate before a run equals the memory of its ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder

LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"tp": 2, "precision": "bf16"},
        {"pp": 2},
        {"fsdp": True},
        {"pp": 2, "optim": {"optimizer": "muon"}, "more": {"freeze": ["lm_head.*"]}},
        {"tp": 2, "precision": "bf16", "lora": {"rank": 4, "dora": True, "modules_to_save": ["lm_head"]}},
        {"pp": 2, "precision": "bf16", "lora": {"rank": 4, "quantize": "nf4"}},
    ],
    "deepseek_v2": [{"ep": 2, "precision": "bf16"}],
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_parameters_and_optimizer_state_are_exact(
    two_ranks: RankPool, samples: Path, tmp_path: Path, family: str
) -> None:
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=3, tie_word_embeddings=False)
    for layout in LAYOUTS[family]:
        if "quantize" in layout.get("lora", {}) and find_spec("bitsandbytes") is None:
            continue
        results = two_ranks.run("ranks.tasks.estimated_and_actual_memory", model=model, samples=samples, **layout)
        estimate = results[0]["estimate"]
        largest = max(results, key=lambda rank: rank["parameters"])
        assert largest["parameters"] == estimate["parameters"]
        if "fsdp" not in layout:
            assert largest["weights"] == estimate["weights"]
        # With 16-bit weights, the optimizer also has float32 weights. Shards of the state are padded to 64 elements.
        moments_ratio = 8 / 12 if layout.get("precision") == "bf16" else 1.0
        tolerance = 0.02 if {"fsdp", "ep"} & layout.keys() else 1e-9
        assert max(rank["moments"] for rank in results) == pytest.approx(
            estimate["optimizer"] * moments_ratio, rel=tolerance
        )


@pytest.mark.thorough_cases("pp", "fsdp")
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"fsdp": True}], ids=["tp", "pp", "fsdp"])
def test_the_estimate_is_the_peak_of_a_step(layout: dict[str, Any], two_ranks: RankPool) -> None:
    """benchmarks/planner_memory.py has more layouts."""
    sizes = {
        "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    for rank in two_ranks.run("ranks.memory_tasks.step_memory", model=sizes, seq_length=256, **layout):
        assert rank["estimated"] == pytest.approx(rank["measured"], rel=0.1), rank["text"]
