"""Logits of every family equal those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isthmus.config.schema.model import ModelConfig
from isthmus.families.registry import all_families, family_for
from isthmus.recipes.model.model_source import open_source
from ranks.rank_pool import RankPool
from ranks.tiny import SIZES, VOCAB, build_model_folder
from ranks.tiny_families import TINY_FAMILIES
from sweep import BLOCK_FAMILIES, thorough_but

LENGTHS = [97, 1, 40, 2]
"""Up to more than any window and any original context below."""
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32, "beta_slow": 1}

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
CAPPED = {"attn_logit_softcapping": 0.2, "query_pre_attn_scalar": 1}


def _kinds(letters: str) -> list[str]:
    return [{"f": "full_attention", "s": "sliding_attention"}[letter] for letter in letters]


def _longrope(pairs: int, **share: float) -> dict[str, Any]:
    """Two samples are longer than the original context, two are shorter."""
    factors = {"short_factor": [1.0 + 0.1 * pair for pair in range(pairs)], "long_factor": [4.0] * pairs}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **share}
    return {"head_dim": 8, "original_max_position_embeddings": 32, "rope_parameters": rope}


LONGROPE = _longrope(4)


def _layered(local_theta: float) -> dict[str, Any]:
    linear = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
    rope = {"full_attention": linear, "sliding_attention": PLAIN | {"rope_theta": local_theta}}
    return {"sliding_window": 20, "layer_types": _kinds("sfss"), "rope_parameters": rope}


MIXED = {
    **{"position_embedding_type": "rope", "layer_form": "sandwich", "norm_bias": False, "norm_zero_centered": True},
    **{"qk_norm": True, "attention_softcap": 1.0, "attention_sinks": True, "sliding_window": 7},
    **{"layer_types": _kinds("sfsf"), "unrotated_layers": [1], "residual_multiplier": 0.5, "gated_mlp": True},
    **{"scoring_func": "sigmoid", "router_expert_bias": True, "n_group": 3, "topk_group": 2, "norm_topk_prob": True},
    **{"router_bias": True, "logits_softcap": 3.0, "embedding_multiplier": 4.0, "tie_word_embeddings": True},
    **{"rotary_interleaved": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
}
"""A combination of settings that no model of transformers has."""


# (family, settings, settings that turn the tested feature off); without the feature, logits must differ clearly.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "llama-untied": ("llama", {"tie_word_embeddings": False}, None),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, None),
    "llama-mha": ("llama", {"num_key_value_heads": 4}, None),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, None),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, {}),
    "llama-rope-llama3-factor-8": ("llama", {"rope_parameters": LLAMA3 | {"factor": 8.0}}, {}),
    "llama-rope-llama3-factor-32": ("llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}}, {}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {},
    ),
    "llama-rope-dynamic": (
        "llama",
        {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 32},
        {"max_position_embeddings": 32},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}, None),
    "mistral-window-of-5": ("mistral", {"sliding_window": 5}, {"sliding_window": None}),
    "mistral-window-of-1": ("mistral", {"sliding_window": 1}, {"sliding_window": 2}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, None),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}, None),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, None),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}, None),
    "mixtral": ("mixtral", {}, {"num_experts_per_tok": 1}),
    "qwen3_moe-plain": ("qwen3_moe", {"attention_bias": True}, {"norm_topk_prob": True}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}, {"norm_topk_prob": False}),
    "olmoe": ("olmoe", {"attention_bias": True}, {"attention_bias": False}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        {"rope_parameters": YARN},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1, "routed_scaling_factor": 16.0},
        {"topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, "rope_interleave": False},
    ),
    "deepseek_v3-half-rotary": (
        "deepseek_v3",
        {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "rms_norm_eps": 1e-2, "q_lora_rank": None},
        {"norm_topk_prob": True},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_norm_min": 0.9, "moe_layer_interval": 2}, {"moe_norm_min": 1e-12}),
    "ernie4_5_moe-untied": (
        "ernie4_5_moe",
        {"tie_word_embeddings": False, "moe_num_shared_experts": 0, "moe_layer_end_index": 2},
        {"moe_layer_end_index": 3},
    ),
    "glm4_moe": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_group": 3, "topk_group": 1, "routed_scaling_factor": 2.5},
        {"topk_group": 2},
    ),
    "glm4_moe-plain": ("glm4_moe", {"n_shared_experts": 2, "norm_topk_prob": False}, {"norm_topk_prob": True}),
    "isthmus": ("isthmus", {}, {"num_experts_per_tok": 1}),
    "isthmus-mixed": (
        "isthmus",
        MIXED,
        MIXED | {"residual_multiplier": 1.0, "attention_softcap": None, "unrotated_layers": []},
    ),
    "isthmus-parallel-layers": (
        "isthmus",
        {"layer_form": "parallel_two_norms", "num_experts_per_tok": 1, "hidden_act": "gelu_pytorch_tanh"},
        {"layer_form": "parallel_two_norms", "num_experts_per_tok": 2, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gpt_oss": ("gpt_oss", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
    "gpt_oss-all-windows": (
        "gpt_oss",
        {"layer_types": ["sliding_attention"] * 4, "num_experts_per_tok": 3},
        {"layer_types": ["full_attention"] * 4},
    ),
    "qwen2_moe-shared": ("qwen2_moe", {"decoder_sparse_step": 2}, {"decoder_sparse_step": 1}),
    "qwen2_moe-no-biases": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}, {"norm_topk_prob": False}),
    "llama-biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2-window-some-layers": ("qwen2", WINDOW | {"max_window_layers": 3}, WINDOW | {"max_window_layers": 2}),
    "qwen3-window-by-list": (
        "qwen3",
        WINDOW | {"layer_types": _kinds("fsfs")},
        WINDOW | {"layer_types": _kinds("sfsf")},
    ),
    "seed_oss": ("seed_oss", {}, {"attention_bias": False}),
    "seed_oss-output-bias": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        {"attention_out_bias": False, "mlp_bias": False},
    ),
    "smollm3": ("smollm3", {}, {"no_rope_layer_interval": 3}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}, {"no_rope_layers": [1, 1, 1, 0]}),
    "granite-embeddings": ("granite", {"embedding_multiplier": 3.0}, {"embedding_multiplier": 1.0}),
    "granite-residuals": ("granite", {"residual_multiplier": 0.4}, {"residual_multiplier": 1.0}),
    "granite-scores": ("granite", {"attention_multiplier": 0.2}, {"attention_multiplier": 0.25}),
    "granite-logits": ("granite", {"logits_scaling": 6.0}, {"logits_scaling": 1.0}),
    "phi3": ("phi3", {"sliding_window": 5}, {"sliding_window": None}),
    "phi3-longrope": ("phi3", LONGROPE, {"rope_parameters": PLAIN}),
    "phi3-longrope-partial": ("phi3", _longrope(2, partial_rotary_factor=0.5), LONGROPE),
    "starcoder2": ("starcoder2", {"sliding_window": 5}, {"sliding_window": None}),
    "starcoder2-untied-no-biases": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"},
        {"use_bias": True},
    ),
    "gpt_neox": ("gpt_neox", {}, {"use_parallel_residual": False}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "rotary_pct": 0.5},
        {"rotary_pct": 0.25},
    ),
    "gpt2": ("gpt2", {}, {"n_inner": 48}),
    "gpt2-narrow-untied": ("gpt2", {"n_inner": 48, "tie_word_embeddings": False}, {"n_inner": 40}),
    "olmo2": ("olmo2", {"rms_norm_eps": 0.5}, {"rms_norm_eps": 1e-5}),
    "glm4": ("glm4", {}, {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}}),
    "cohere": ("cohere", {}, {"logit_scale": 0.25}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}, {"use_qk_norm": False}),
    "cohere-biases": ("cohere", {"attention_bias": True, "logit_scale": 1.0}, {"attention_bias": False}),
    "gemma": ("gemma", {}, {"head_dim": 8}),
    "gemma2": ("gemma2", {"sliding_window": 5}, {"sliding_window": 50}),
    "gemma2-scores": ("gemma2", CAPPED, CAPPED | {"attn_logit_softcapping": None}),
    "gemma2-logits": ("gemma2", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": None}),
    "gemma2-scalar": ("gemma2", {"query_pre_attn_scalar": 2}, {"query_pre_attn_scalar": 4}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 5, "layer_types": _kinds("sfss")}, {"sliding_window": 50}),
    "gemma3_text-bases": ("gemma3_text", _layered(5.0), {"rope_parameters": _layered(10000.0)["rope_parameters"]}),
    "gemma3_text-capped": (
        "gemma3_text",
        {"sliding_window_pattern": 2, "final_logit_softcapping": 2.0},
        {"final_logit_softcapping": None},
    ),
    **{
        case: (family, settings, off)
        for family, tiny in TINY_FAMILIES.items()
        for case, (settings, off) in tiny.logits.items()
    },
}


IN_MAKE_TEST = (
    *BLOCK_FAMILIES, "apertus", "bailing_hybrid", "bamba", "cohere-qk-norm", "cohere2", "cohere2_moe",
    "cohere2_moe-sum", "deepseek_v2-lite", "ernie4_5_moe", "exaone4", "falcon_h1", "falcon_h1-norm-first",
    "flex_olmo", "gemma4_text", "gemma4_text-small", "glm_moe_dsa-shared", "granitemoehybrid", "hunyuan_v1_dense",
    "isthmus-mixed", "isthmus-parallel-layers", "jamba", "lfm2_moe-no-bias", "llama-rope-dynamic",
    "llama-rope-linear", "llama4_text", "mimo_v2_flash", "nanochat", "olmo", "olmo_hybrid", "opt", "phi",
    "phimoe-longrope", "qwen3-tied", "step3p5", "step3p5-heads",
)  # fmt: skip
"""Together they have every kind of setting (test_sweeps.py); the others run in `make test-all`."""


def test_every_family_has_a_case() -> None:
    assert {family for family, _, _ in CASES.values()} == set(all_families())


@pytest.mark.parametrize("case", thorough_but(CASES, IN_MAKE_TEST))
def test_logits_equal_transformers(case: str, one_rank: RankPool, tmp_path: Path) -> None:
    family, settings, off = CASES[case]
    model = build_model_folder(tmp_path / "model", family, **settings)
    other = None if off is None else build_model_folder(tmp_path / "other", family, **{**_plain(settings), **off})
    results = one_rank.run("parity.tasks.logits", model=model, other=other, lengths=LENGTHS, vocab_size=VOCAB)
    assert results["theirs"] < 1e-4
    assert results["packed"] < 2e-5  # qwen3_5_text: 1.03e-5 on some CPUs
    assert off is None or results["other"] > 1e-2


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "rope_parameters"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_bf16_error_is_at_most_that_of_transformers(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", family)
    results = one_rank.run("parity.tasks.rounding", model=model, lengths=[97, 40], vocab_size=VOCAB)
    assert results["ours"] < 1.5 * results["theirs"]


@pytest.mark.parametrize("length", [24, 17])
@pytest.mark.parametrize(
    "case", ["qwen3-tied", "qwen2-untied", "qwen2_moe-shared", "deepseek_v3", "gpt_oss", "isthmus"]
)
def test_logits_on_two_ranks(case: str, length: int, two_ranks: RankPool, tmp_path: Path) -> None:
    family, settings, _ = CASES[case]
    model = build_model_folder(tmp_path / "model", family, **settings)
    tokens = [(7 * index + 3) % VOCAB for index in range(length)]
    ours = torch.tensor(two_ranks.run("ranks.tasks.logits_of", model=model, tokens=tokens, tp=2))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([tokens])).logits[0]
    assert ours.shape == (length, SIZES["vocab_size"])
    assert (ours - theirs).abs().max() < 1e-4


LAID_OVER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
    ("qwen3", {"rope_scaling": LLAMA3 | {"factor": 8.0}, "rope_theta": 5e4}, LLAMA3 | {"factor": 8.0}),
]


@pytest.mark.parametrize(("family", "keys", "rope"), LAID_OVER, ids=["yarn", "linear", "llama3"])
def test_rotary_settings_over_weights(
    family: str, keys: dict[str, Any], rope: dict[str, Any], one_rank: RankPool, tmp_path: Path
) -> None:
    """The exported config gives transformers our logits, which are those of its own settings."""
    base = build_model_folder(tmp_path / "base", family)
    outcome = open_source(ModelConfig(path=str(base), config=keys))
    exported_family = family_for(outcome.config)
    exported = shutil.copytree(base, tmp_path / "exported")
    config = exported_family.to_hf_config(exported_family.to_architecture(outcome.config), outcome.config)
    (exported / "config.json").write_text(json.dumps(config))
    result = one_rank.run("parity.tasks.logits", model=exported, other=base, lengths=LENGTHS, vocab_size=VOCAB)
    assert result["theirs"] < 1e-4 and result["other"] > 1e-3
    assert config["max_position_embeddings"] == keys.get("max_position_embeddings", 128)
    theta = keys.get("rope_theta", 10000.0)
    theirs = AutoModelForCausalLM.from_pretrained(base, rope_parameters=rope | {"rope_theta": theta})
    tokens = torch.tensor([[(7 * index + 3) % VOCAB for index in range(97)]])
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(exported)(tokens).logits
        assert torch.equal(theirs(tokens).logits, again)


def test_two_models_in_one_process(one_rank: RankPool, tmp_path: Path) -> None:
    models = [build_model_folder(tmp_path / family, family) for family in ("llama", "qwen3")]
    tokens = [1, 5, 9, 2]
    ours = one_rank.run("parity.tasks.logits_of_models", models=[str(model) for model in models], tokens=tokens)
    for folder, result in zip(models, ours, strict=True):
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, -1]
        assert torch.allclose(torch.tensor(result), theirs, atol=1e-4)


def test_limits_of_swiglu_by_layer(one_rank: RankPool, tmp_path: Path) -> None:
    routed, others = [None, None, 0.02, 0.01], [None, 0.015, None, 0.02]
    model = build_model_folder(tmp_path, "bailing_hybrid")
    results = one_rank.run(
        "parity.tasks.limited_logits", model=model, routed=routed, others=others, lengths=[40, 3], vocab_size=VOCAB
    )
    assert results["limited"] <= 1e-5 and results["theirs"] > 1e-3
