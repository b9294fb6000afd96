"""What a run is said to hold, before it is built, is what its ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.tiny import build_model_folder
from ranks.world import World


@pytest.mark.parametrize(
    ("family", "layout", "shared"),
    [
        ("llama", {"tp": 2, "precision": "bf16"}, 1),
        ("qwen3", {"pp": 2}, 1),
        ("qwen3_moe", {"ep": 2, "precision": "bf16"}, 2),
        ("deepseek_v2", {"precision": "bf16"}, 2),
        ("llama", {"fsdp": True}, 2),
    ],
)
def test_parameters_and_optimizer_state_are_exact(
    two: World, samples: Path, tmp_path: Path, family: str, layout: dict[str, Any], shared: int
) -> None:
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=3, tie_word_embeddings=False)
    found = two.run_all("ranks.tasks.footprint_and_held", model=model, samples=samples, **layout)
    said = found[0]["said"]
    most = max(found, key=lambda rank: rank["parameters"])
    assert most["parameters"] == said["parameters"]
    if not layout.get("fsdp"):
        assert most["weights"] == said["weights"]
    # Sixteen bits keep a float32 weight beside the moments; a shard may end anywhere within 64 elements.
    of_moments = 8 / 12 if layout.get("precision") == "bf16" else 1.0
    largest = max(rank["moments"] for rank in found)
    assert largest == pytest.approx(said["optimizer"] * of_moments, rel=0.02 if shared > 1 else 1e-9)
