"""Training equals a reference implementation with plain transformers and torch: losses and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.families.registry import all_families
from isthmus.hf.model_folder import ModelFolder
from ranks.rank_pool import RankPool
from ranks.tasks import CLIP_GRAD
from ranks.test_layouts import max_relative_difference
from ranks.tiny import VOCAB, build_model_folder
from ranks.tiny_families import TINY_FAMILIES
from sweep import thorough_but

CAPPED = {"sliding_window": 5, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
MULTIPLIERS = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
LONGROPE = {
    "head_dim": 8,
    "original_max_position_embeddings": 12,
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0] * 4},
}

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 6.0},
    "gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "sliding_window": 5},
    **{family: tiny.training for family, tiny in TINY_FAMILIES.items()},
}
"""Settings for family features that are off by default."""
FAMILIES = sorted(all_families())
GEMMA4 = TINY_FAMILIES["gemma4_text"].training
ONE_OF_EACH_MIXER = ("kimi_linear", "qwen3_next", "nemotron_h", "jamba", "lfm2", "deepseek_v32")
"""Of ``TINY_FAMILIES``: `make test` takes their steps on two ranks, `make test-all` those of all."""


@pytest.mark.parametrize("family", thorough_but(FAMILIES))
def test_gradients_in_a_custom_training_loop(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", family, **{"num_hidden_layers": 2, **SETTINGS.get(family, {})})
    results = one_rank.run("parity.tasks.gradients", model=model, length=40, vocab_size=VOCAB)
    config = ModelFolder.open(model).config
    arch = all_families()[family].to_architecture(config)
    placements = all_families()[family].placements(arch).values()
    expected = {placed.canonical for placed in placements if placed.rule.trained and not placed.rule.alias}
    assert results.keys() == expected
    # dt_bias of delta nets sums over all tokens: up to 2.9e-5, depending on how the matmuls of the CPU round.
    assert max(results.values()) < 4e-5


@pytest.mark.thorough_cases("qwen3-tied", "llama-tied", "mistral-window-of-5", "qwen2-untied")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3", {"tie_word_embeddings": True}, id="qwen3-tied"),
        pytest.param("qwen2", {"tie_word_embeddings": False}, id="qwen2-untied"),
        pytest.param("mistral", {"sliding_window": 5}, id="mistral-window-of-5"),
        pytest.param("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, id="qwen3_moe"),
        pytest.param("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}, id="llama-tied"),
    ],
)
def test_steps_equal_plain_transformers(
    family: str, settings: dict[str, Any], one_rank: RankPool, samples: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=2, **settings)
    ours = one_rank.run("ranks.tasks.train", model=model, samples=samples, micro_batch_size=2)
    theirs = one_rank.run("parity.tasks.train", model=model, samples=samples, lr=ours["lr"], weight_decay=0.1)
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5
    assert min(theirs["grad_norm"]) < CLIP_GRAD < max(theirs["grad_norm"])


@pytest.mark.thorough_cases(
    "granite",
    "smollm3",
    "cohere",
    "gemma3_text",
    "gemma",
    "gemma2",
    "glm4",
    "gpt2-no-sp",
    "gpt_neox",
    "olmo2",
    "phi3",
    "seed_oss",
    "starcoder2",
)
@pytest.mark.parametrize(
    ("family", "settings", "layout"),
    [
        pytest.param("gpt2", {}, {"tp": 2}, id="gpt2"),
        pytest.param("gpt2", {"tie_word_embeddings": False}, {"tp": 2, "sp": False}, id="gpt2-no-sp"),
        pytest.param("gpt_neox", {}, {"tp": 2}, id="gpt_neox"),
        pytest.param("gemma", {}, {"pp": 2}, id="gemma"),
        pytest.param("gemma2", CAPPED, {"tp": 2, "recompute": "full"}, id="gemma2"),
        pytest.param("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2}, {"tp": 2}, id="gemma3_text"),
        pytest.param("phi3", LONGROPE, {"tp": 2}, id="phi3"),
        pytest.param("olmo2", {}, {"tp": 2}, id="olmo2"),
        pytest.param("olmo2", {"num_key_value_heads": 1}, {"tp": 2, "sp": False}, id="olmo2-mqa"),
        pytest.param("granite", MULTIPLIERS, {"pp": 2}, id="granite"),
        pytest.param("starcoder2", {"sliding_window": 5}, {"tp": 2}, id="starcoder2"),
        pytest.param("glm4", {}, {"tp": 2}, id="glm4"),
        pytest.param("cohere", {"attention_bias": True}, {"tp": 2, "recompute": "selective"}, id="cohere"),
        pytest.param("smollm3", {"num_hidden_layers": 4}, {"pp": 2, "recompute": "full"}, id="smollm3"),
        pytest.param("seed_oss", {"attention_out_bias": True, "mlp_bias": True}, {"tp": 2}, id="seed_oss"),
        pytest.param("gemma4", {}, {"tp": 2, "recompute": "full"}, id="gemma4-full", marks=pytest.mark.thorough),
        pytest.param("gemma4", {}, {"tp": 2, "sp": False}, id="gemma4-no-sp", marks=pytest.mark.thorough),
        pytest.param("gemma4", {}, {"recompute": "selective"}, id="gemma4-selective", marks=pytest.mark.thorough),
        pytest.param("gemma4_text", GEMMA4, {"fsdp": True}, id="gemma4_text-fsdp", marks=pytest.mark.thorough),
        *(
            pytest.param(
                family,
                tiny.training,
                layout,
                id=f"{family}-{layout}",
                marks=() if family in ONE_OF_EACH_MIXER and layout == tiny.layouts[0] else pytest.mark.thorough,
            )
            for family, tiny in TINY_FAMILIES.items()
            for layout in tiny.layouts
        ),
    ],
)
def test_first_steps_on_two_ranks_equal_plain_transformers(
    family: str,
    settings: dict[str, Any],
    layout: dict[str, Any],
    one_rank: RankPool,
    two_ranks: RankPool,
    samples: Path,
    tmp_path: Path,
) -> None:
    sizes = {} if family in (*TINY_FAMILIES, "gemma4") else {"num_hidden_layers": 2}
    model = build_model_folder(tmp_path / "model", family, **sizes | settings)
    # With fewer samples, gradients of delta nets cancel less: their norms differ by up to 2.2e-5.
    run: dict[str, Any] = {"model": model, "samples": samples, "global_batch_size": 8}
    ours = two_ranks.run("ranks.tasks.train", micro_batch_size=4, steps=3, **run, **layout)
    theirs = one_rank.run("parity.tasks.train", lr=ours["lr"], weight_decay=0.1, **run)
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gpt2", ("attn_pdrop", "resid_pdrop", "embd_pdrop")),
        ("gpt_neox", ("attention_dropout", "hidden_dropout")),
        ("starcoder2", ("attention_dropout", "residual_dropout", "embedding_dropout")),
        ("phi3", ("attention_dropout", "resid_pdrop")),
        ("seed_oss", ("attention_dropout", "residual_dropout")),
    ],
)
def test_dropout_is_where_transformers_has_it(
    family: str, keys: tuple[str, ...], one_rank: RankPool, tmp_path: Path
) -> None:
    rates = dict(zip(keys, (0.2, 0.3, 0.4), strict=False))
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4}
    model = build_model_folder(tmp_path / "model", family, **sizes, **rates)
    results = one_rank.run("parity.tasks.dropout", model=model, length=40, vocab_size=VOCAB)
    assert max(results["logits"], results["gradient"]) < 2e-5 and results["without"] > 0.05
