"""Adapters of PEFT in runs: in every layout the model with the adapter is the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.convert.transfer import convert
from isthmus.errors import UsageError
from ranks.rank_pool import RankPool
from ranks.tiny import build_adapter, build_model_folder

pytest.importorskip("peft", minversion="0.21", reason="PEFT is not installed (extra: bench)")
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-dora": (
        "qwen3",
        {
            "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
            "use_dora": True,
            "rank_pattern": {"v_proj": 5},
            "alpha_pattern": {"layers.1.mlp.down_proj": 2},
            "modules_to_save": ["lm_head", "norm"],
        },
    ),
    "phi3-rslora": ("phi3", {"target_modules": "all-linear", "use_rslora": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "target_parameters": ["model.layers.0.mlp.down_proj.weight", "shared_experts.up_proj.weight"],
        },
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_existing_adapter_is_that_of_peft(
    name: str, one: RankPool, two: RankPool, samples: Path, tmp_path: Path
) -> None:
    family, settings = ADAPTERS[name]
    base = build_model_folder(tmp_path / "base", family, tie_word_embeddings=False, num_hidden_layers=2)
    adapter = build_adapter(base, tmp_path / "adapter", **settings)
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    run: dict[str, Any] = {"samples": samples, "steps": 0, "evaluate": True}
    plain, merged = (
        one.run("ranks.tasks.train", model=tmp_path / model, **run)["valid_before"] for model in ("base", "merged")
    )
    assert abs(merged - plain) > 1e-3
    lora = {"path": str(adapter)}
    for world, layout in ((one, {}), (two, {"tp": 2}), (two, {"pp": 2})):
        loss = world.run("ranks.tasks.train", model=base, lora=lora, **run, **layout)["valid_before"]
        assert loss == pytest.approx(merged, rel=1e-6)


def test_checkpoint_of_adapters_is_not_converted(one: RankPool, samples: Path, tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "llama", num_hidden_layers=1)
    lora = {"rank": 2, "targets": "q_proj"}
    one.run("ranks.tasks.train", model=base, samples=samples, steps=1, save_at=[1], root=tmp_path / "saved", lora=lora)
    with pytest.raises(
        UsageError, match=r"saved has the adapters of a run with lora .* isthmus merge BASE RUN/adapter"
    ):
        convert(tmp_path / "saved", tmp_path / "out")
