"""Training of adapters equals PEFT on transformers: losses and gradient norms over the steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import build_model_folder

pytest.importorskip("peft", reason="PEFT is not installed (extra: bench)")
STEPS = 12
EXPERTS: dict[str, Any] = {"rank": 4, "alpha": 16, "targets": ["all-linear"]}


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        pytest.param("qwen3_moe", [{}, {"ep": 2}], id="experts"),
        pytest.param("gpt_oss", [{}], id="transposed-experts"),
    ],
)
def test_losses_equal_peft(
    family: str, layouts: list[dict[str, Any]], one: RankPool, two: RankPool, samples: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=2)
    run = {"model": model, "samples": samples, "lora": EXPERTS, "micro_batch_size": 2, "steps": STEPS}
    ours = [(two if layout else one).run("ranks.tasks.train", **run, **layout) for layout in layouts]
    reference = {"model": model, "samples": samples, "lora": EXPERTS, "lr": ours[0]["lr"], "weight_decay": 0.1}
    theirs = one.run("parity.tasks.train", **reference)
    for found in ours:
        differences = {curve: max_relative_difference(found[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
        print(family, differences)
        assert max(differences.values()) < 1e-5
