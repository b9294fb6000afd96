"""Runs with adapters equal PEFT: losses and gradient norms of all steps, and the logits of the exported adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optional_packages import bitsandbytes, peft
from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import VOCAB, build_model_folder, load_network

pytestmark = peft.required
TOKENS = torch.arange(3, 27)[None] % VOCAB
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.thorough_cases(
    "deepseek_v3-rslora",
    "experts-ep2",
    "llama",
    "mamba2-tp2",
    "multimodal-tp2",
    "qwen3-dora-plus",
    "swapped-experts-ep2",
    "transposed-experts-tp2-etp1",
)
@pytest.mark.parametrize(
    ("family", "model", "lora", "layout"),
    [
        pytest.param("llama", {}, {}, {}, id="llama"),
        pytest.param(
            "qwen3", {"tie_word_embeddings": False},
            {"dora": True, "modules_to_save": ["lm_head", "norm"], "lr_ratio": 4}, {"pp": 2}, id="qwen3-dora-plus",
        ),
        pytest.param(
            "deepseek_v3", {"first_k_dense_replace": 2}, {"rslora": True, "init": "gaussian", "targets": LATENT},
            {"tp": 2}, id="deepseek_v3-rslora",
        ),
        pytest.param("qwen3_moe", {"num_hidden_layers": 2}, {}, {"ep": 2}, id="experts-ep2"),
        pytest.param("gemma3", {"num_hidden_layers": 2}, {}, {"tp": 2}, id="multimodal-tp2"),
        pytest.param("falcon_h1", {}, {}, {"tp": 2}, id="mamba2-tp2"),
        pytest.param("gpt_oss", {"num_hidden_layers": 2}, {}, {"tp": 2, "etp": 1}, id="transposed-experts-tp2-etp1"),
        pytest.param("llama4_text", {"num_hidden_layers": 2}, {}, {"ep": 2}, id="swapped-experts-ep2"),
        pytest.param(
            "qwen3", {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2},
            {"quantize": "nf4"}, {"tp": 2}, id="nf4-tp2", marks=bitsandbytes.required,
        ),
    ],
)  # fmt: skip
def test_steps_and_the_exported_adapter_equal_peft(
    family: str,
    model: dict[str, Any],
    lora: dict[str, Any],
    layout: dict[str, Any],
    one_rank: RankPool,
    two_ranks: RankPool,
    samples: Path,
    tmp_path: Path,
) -> None:
    base = build_model_folder(tmp_path / "base", family, **{"num_hidden_layers": 2} | model)
    world = two_ranks if layout else one_rank
    settings = {"model": base, "samples": samples, "micro_batch_size": 2, "lora": {"rank": 4, "alpha": 24} | lora}
    decay = 0.0 if "lr_ratio" in lora else 0.1  # in PEFT's LoRA+ also that of magnitudes
    settings["optim"] = {"weight_decay": decay, "lr": 5e-3}
    ours = world.run("ranks.tasks.train", **settings, **layout, exports=tmp_path, evaluate=True)
    reference = {"model": base, "samples": samples, "adapter": tmp_path / "before", "quantize": lora.get("quantize")}
    reference |= {"lr_ratio": lora.get("lr_ratio", 1.0), "weight_decay": decay}
    theirs = one_rank.run("parity.tasks.train", **reference, lr=ours["lr"])
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5
    assert ours["valid_after"] < ours["valid_before"] - 0.05
    _check_exports(base, tmp_path)


def test_exported_adapter_of_pissa_is_for_the_original_weights(
    one_rank: RankPool, samples: Path, tmp_path: Path
) -> None:
    base = build_model_folder(tmp_path / "base", "gpt2", num_hidden_layers=2)
    lora = {"rank": 4, "init": "pissa", "targets": ["c_attn", "mlp.c_proj"], "lr_ratio": 4}
    one_rank.run(
        "ranks.tasks.train", model=base, samples=samples, micro_batch_size=2, steps=5, lora=lora, exports=tmp_path
    )
    _check_exports(base, tmp_path)


def _check_exports(base: Path, exports: Path) -> None:
    """The adapter gives the logits of the merged model, and these are not those of the base."""
    with torch.no_grad():
        plain, merged = (load_network(folder, attn_implementation="eager") for folder in (base, exports / "hf"))
        logits = {"base": plain(TOKENS).logits, "merged": merged(TOKENS).logits}
        adapted = peft.PeftModel.from_pretrained(plain, exports / "adapter")
        logits["adapted"] = adapted(TOKENS).logits
    assert not any("lora_" in name for name, _ in adapted.named_parameters() if "vision" in name)
    assert (logits["adapted"] - logits["merged"]).abs().max() < 1e-5
    assert (logits["adapted"] - logits["base"]).abs().max() > 0.05
