"""What a run is said to hold, before it is built, is what its ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder

LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"tp": 2, "precision": "bf16"}, {"pp": 2}, {"fsdp": True}],
    "deepseek_v2": [{"ep": 2, "precision": "bf16"}],
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_parameters_and_optimizer_state_are_exact(two: RankPool, samples: Path, tmp_path: Path, family: str) -> None:
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=3, tie_word_embeddings=False)
    for layout in LAYOUTS[family]:
        found = two.run("ranks.tasks.footprint_and_held", model=model, samples=samples, **layout)
        said = found[0]["said"]
        most = max(found, key=lambda rank: rank["parameters"])
        assert most["parameters"] == said["parameters"]
        if "fsdp" not in layout:
            assert most["weights"] == said["weights"]
        # Sixteen bits keep a float32 weight beside the moments; where dp shares the state out, a shard ends anywhere
        # within 64 elements.
        of_moments = 8 / 12 if layout.get("precision") == "bf16" else 1.0
        shared = 0.02 if {"fsdp", "ep"} & layout.keys() else 1e-9
        assert max(rank["moments"] for rank in found) == pytest.approx(said["optimizer"] * of_moments, rel=shared)
