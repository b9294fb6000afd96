"""Architecture to Megatron-LM args and back; unsupported features and args."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.convert.family_matching import LAST_RESORT, match_family
from isthmus.convert.legacy.megatron_args import megatron_args, required_flags, unsupported_features
from isthmus.convert.legacy.model_from_args import architecture_from_args
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, from_settings
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.rotary import RopeScaling
from isthmus.families.registry import all_families
from ranks.tiny import SIZES, tiny_config
from sweep import by_tier

PLAIN = from_settings(
    {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 77,
        "max_position_embeddings": 128,
        "norm_epsilon": 1e-5,
    }
)
MOE = Experts(num_experts=8, top_k=4, ffn_hidden_size=12, normalize=True)
LATENT = PLAIN.with_settings(
    {
        "num_query_groups": 4,
        "kv_channels": 18,
        "rotary_interleaved": True,
        "norm_epsilon": 1e-6,
        "mla": Latent(kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=6),
    }
)
YARN = RopeScaling(kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
DEEPSEEK = replace(MOE, score="sigmoid", expert_bias=True, num_groups=2, group_top_k=2, scaling_factor=2.5)


def args_of(arch: Architecture) -> dict[str, Any]:
    return vars(megatron_args(arch, torch.float32))


def tiny(family: str, **settings: Any) -> Architecture:
    return all_families()[family].to_architecture(tiny_config(family, SIZES, **settings).to_dict())


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        pytest.param(PLAIN, [], id="plain"),
        pytest.param(PLAIN.with_settings({"norm_epsilon": 1e-6}), ["--norm-epsilon 1e-06"], id="epsilon"),
        pytest.param(PLAIN.with_settings({"qk_norm": True}), ["--qk-layernorm"], id="qk-norm"),
        pytest.param(PLAIN.with_settings({"norm_zero_centered": True}), ["--apply-layernorm-1p"], id="zero-centred"),
        pytest.param(PLAIN.with_settings({"sliding_window": 8}), ["--window-size 7,0"], id="window"),
        pytest.param(
            PLAIN.with_settings({"sliding_window": 8, "full_attention_layers": (1, 3)}),
            ["--window-size 7,0", "--window-attn-skip-freq '[1,0,1,0]'"],
            id="windows",
        ),
        pytest.param(PLAIN.with_settings({"unrotated_layers": (3,)}), ["--no-rope-freq '[0,0,0,1]'"], id="unrotated"),
        pytest.param(
            PLAIN.with_settings({"rope_scaling": RopeScaling(kind="llama3", factor=8.0)}),
            ["--use-rope-scaling"],
            id="llama-3.1",
        ),
        pytest.param(PLAIN.with_settings({"attention_sinks": True}), ["--softmax-type learnable"], id="sinks"),
        pytest.param(PLAIN.with_settings({"position": "learned"}), [], id="learned-positions"),
        pytest.param(
            PLAIN.with_settings({"rotary_percent": 0.5, "rotary_interleaved": True, "rotary_base": 5e5}),
            [],
            id="rotary",
        ),
        pytest.param(PLAIN.with_settings({"qkv_bias": True, "tie_embeddings": True}), [], id="qkv-bias"),
        pytest.param(
            PLAIN.with_settings({"activation": "gelu", "gated": False, "normalization": "LayerNorm"}),
            ["--no-bias-gelu-fusion"],
            id="gelu",
        ),
        pytest.param(
            PLAIN.with_settings(
                {"activation": "gelu_tanh", "gated": False, "qkv_bias": True, "proj_bias": True, "mlp_bias": True}
            ),
            [],
            id="gelu-tanh-biases",
        ),
        pytest.param(
            PLAIN.with_settings({"activation": "clamped_swiglu"}),
            ["--quick-geglu", "--activation-func-clamp-value 7.0", "--glu-linear-offset 1.0"],
            id="clamped",
        ),
        pytest.param(PLAIN.with_settings({"moe": MOE}), [], id="experts"),
        pytest.param(
            PLAIN.with_settings(
                {"moe": replace(MOE, normalize=False, dense_layers=(0,), shared_ffn_hidden_size=20, shared_gate=True)}
            ),
            ["--moe-shared-expert-gate"],
            id="shared-experts",
        ),
        pytest.param(
            PLAIN.with_settings({"moe": DEEPSEEK}),
            ["--moe-router-num-groups 2", "--moe-router-group-topk 2"],
            id="grouped-experts",
        ),
        pytest.param(
            LATENT,
            [
                *("--norm-epsilon 1e-06", "--qk-layernorm", "--multi-latent-attention", "--kv-lora-rank 12"),
                *("--qk-head-dim 10", "--qk-pos-emb-head-dim 8", "--v-head-dim 6", "--rope-type rope"),
            ],
            id="latent",
        ),
        pytest.param(
            LATENT.with_settings({"rope_scaling": YARN, "mtp_layers": 1}),
            [
                *("--norm-epsilon 1e-06", "--qk-layernorm", "--multi-latent-attention", "--kv-lora-rank 12"),
                *("--qk-head-dim 10", "--qk-pos-emb-head-dim 8", "--v-head-dim 6", "--rope-type yarn"),
                *("--rotary-scaling-factor 40.0", "--mscale-all-dim 1.0", "--mtp-num-layers 1"),
            ],
            id="latent-yarn-ahead",
        ),
    ],
)
def test_args_round_trip(arch: Architecture, flags: list[str]) -> None:
    assert unsupported_features(arch) == []
    assert sorted(required_flags(arch)) == sorted(flags)
    assert architecture_from_args(args_of(arch)) == (replace(arch, family=""), [])


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (PLAIN.with_settings({"form": "sandwich"}), "form 'sandwich'"),
        (PLAIN.with_settings({"normalization": "LayerNorm", "norm_bias": False}), "norms without a bias"),
        (PLAIN.with_settings({"qk_norm": True, "qk_norm_over": "projection"}), "all heads together"),
        (PLAIN.with_settings({"qk_norm": True, "qk_norm_over": "each_head"}), "of their own for each head"),
        (PLAIN.with_settings({"qk_norm": True, "qk_norm_after_rotation": True}), "after the rotation"),
        (PLAIN.with_settings({"norm_weight": False}), "norms without weights"),
        (PLAIN.with_settings({"embedding_norm": True}), "a norm of the embeddings"),
        (PLAIN.with_settings({"clip_qkv": 8.0}), "clip_qkv=8"),
        (PLAIN.with_settings({"rotary_reversed": True}), "reversed rotations"),
        (PLAIN.with_settings({"position_offset": 2}), "2 rows before the first"),
        (PLAIN.with_settings({"output_bias": True}), "a bias of the output layer"),
        (PLAIN.with_settings({"activation": "relu2", "gated": False}), "the activation relu2"),
        (LATENT.with_settings({"norm_epsilon": 1e-5}), "a different norm epsilon"),
        (LATENT.with_settings({"rotary_interleaved": False}), "pairs of halves"),
        (PLAIN.with_settings({"rope_scaling": RopeScaling(kind="llama3", factor=32.0)}), "rope scaling 'llama3'"),
        (PLAIN.with_settings({"rope_scaling": RopeScaling(kind="linear", factor=2.0)}), "rope scaling 'linear'"),
        (PLAIN.with_settings({"rope_scaling": YARN}), "rope scaling 'yarn'"),
        (LATENT.with_settings({"rope_scaling": replace(YARN, beta_fast=16.0)}), "rope scaling 'yarn'"),
        (LATENT.with_settings({"rope_scaling": replace(YARN, mscale=None)}), "rope scaling 'yarn'"),
        (PLAIN.with_settings({"sliding_window": 8, "window_rotary_base": 1e4}), "rotary base"),
        (PLAIN.with_settings({"attention_scale": 0.5}), "attention_scale=0.5"),
        (PLAIN.with_settings({"attention_softcap": 50.0}), "attention_softcap=50"),
        (PLAIN.with_settings({"mlp_bias": True}), "biases"),
        (PLAIN.with_settings({"activation": "gelu_tanh"}), "activation"),
        (PLAIN.with_settings({"moe": replace(MOE, expert_bias=True)}), "expert routing"),
        (
            PLAIN.with_settings({"moe": replace(MOE, num_groups=2, group_top_k=2, normalize=False, group_score="max")}),
            "expert routing",
        ),
        (PLAIN.with_settings({"moe": replace(DEEPSEEK, normalize=False)}), "expert routing"),
        (PLAIN.with_settings({"embedding_multiplier": 2.0, "residual_multiplier": 0.5}), "residual_multiplier=0.5"),
        (PLAIN.with_settings({"logits_multiplier": 0.5, "logits_softcap": 30.0}), "logits_softcap=30"),
    ],
)
def test_unsupported_features_of_megatron_lm(arch: Architecture, words: str) -> None:
    assert words in ", ".join(unsupported_features(arch))


def test_default_attention_scale_is_supported() -> None:
    assert unsupported_features(PLAIN.with_settings({"attention_scale": 0.25})) == []
    assert unsupported_features(PLAIN.with_settings({"attention_scale": 0.125})) != []


@pytest.mark.parametrize(
    "family", by_tier(name for name, family in all_families().items() if name != LAST_RESORT and family.nested is None)
)
def test_family_is_recovered_from_args(family: str) -> None:
    arch = tiny(family)
    if lacks := unsupported_features(arch):
        # Without these features the args describe another model, which must not match this one.
        try:
            _, result, _ = match_family(architecture_from_args(args_of(arch))[0])
        except UsageError:
            return
        assert replace(result, family=family) != arch, lacks
        return
    first, result, others = match_family(architecture_from_args(args_of(arch))[0])
    assert family in (first.name, *others)
    assert replace(result, family=family) == arch


@pytest.mark.parametrize(
    ("settings", "family", "another"),
    [
        ({}, "llama", "mistral"),
        ({"sliding_window": 8}, "mistral", "ministral"),
        ({"qkv_bias": True}, "qwen2", "seed_oss"),
        ({"qk_norm": True}, "qwen3", "isthmus"),
        ({"moe": MOE, "ffn_hidden_size": 12}, "mixtral", "aria_text"),
        ({"moe": MOE}, "mixtral", "bailing_moe_v2"),
        ({"moe": replace(MOE, score="softmax_of_chosen")}, "mixtral", "aria_text"),
        ({"moe": MOE, "qk_norm": True}, "qwen3_moe", "mellum"),
    ],
)
def test_preferred_family_is_chosen(settings: Mapping[str, Any], family: str, another: str) -> None:
    """Other families that express the model are named after it, the family without settings of its own last."""
    result, arch, also = match_family(PLAIN.with_settings(settings))
    assert result.name == arch.family == family
    assert another in also
    assert also[-1] == "isthmus"
    assert family not in also


def test_first_family_is_preferred_if_it_fits() -> None:
    assert match_family(PLAIN, first="mistral")[0].name == "mistral"
    assert match_family(PLAIN, first="qwen3")[0].name == "llama"


def test_no_family_fits() -> None:
    with pytest.raises(UsageError, match=r"The nearest is \w+, except for .*=.* and not "):
        match_family(LATENT.with_settings({"logits_softcap": 30.0}))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"squared_relu": True}, "squared_relu=True"),
        ({"use_mup": True}, "use_mup=True"),
        ({"qk_l2_norm": True}, "qk_l2_norm=True"),
        ({"attention_output_gate": True}, "attention_output_gate=True"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant='dsa'"),
        ({"is_hybrid_model": True}, "is_hybrid_model=True"),
        ({"spec": ["some.module", "spec"]}, "spec="),
        ({"position_embedding_type": "none"}, "position_embedding_type='none'"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rotary_seq_len_interpolation_factor=4"),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, "rope_scaling_factor=32.*uses 8"),
        ({"window_size": (4, 4)}, r"window_size=\(4, 4\)"),
        ({"swiglu": False, "quick_geglu": True}, "quick_geglu=True"),
        ({"multi_latent_attention": True}, "qk_layernorm=False"),
        ({"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"num_experts": 4, "moe_router_topk": 4, "moe_router_group_topk": 1}, "moe_router_group_topk=1"),
    ],
)
def test_unsupported_args_are_named(changed: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        architecture_from_args(args_of(PLAIN) | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_layers": None}, "num_layers=None"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"layernorm_epsilon": None, "norm_epsilon": None}, "no norm_epsilon"),
        ({"num_experts": 4, "moe_layer_freq": [1, 0]}, r"moe_layer_freq=\[1, 0\].*4 layers"),
    ],
)
def test_invalid_args_are_named(changed: Mapping[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        architecture_from_args(args_of(PLAIN) | changed)


def test_args_of_older_releases() -> None:
    args = args_of(PLAIN.with_settings({"norm_epsilon": 1e-6, "norm_zero_centered": True}))
    for newer in ("layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear", "moe_layer_freq"):
        args.pop(newer, None)
    result, _ = architecture_from_args(args | {"disable_bias_linear": True})
    assert result == PLAIN.with_settings({"family": "", "norm_epsilon": 1e-6, "norm_zero_centered": True})
    assert architecture_from_args(args)[0].mlp.mlp_bias


def test_frequencies_in_place_of_patterns() -> None:
    result, _ = architecture_from_args(
        args_of(PLAIN.with_settings({"moe": MOE}))
        | {"moe_layer_freq": 2, "no_rope_freq": 4, "window_size": (7, 0), "window_attn_skip_freq": 2}
    )
    assert result.moe is not None
    assert (result.moe.dense_layers, result.pattern.unrotated_layers) == ((1, 3), (3,))
    assert (result.windows.sliding_window, result.windows.full_attention_layers) == (8, (1, 3))


@pytest.mark.parametrize(
    ("changes", "requested", "rows", "notes"),
    [
        ({"vocab_size": 77, "padded_vocab_size": 128}, None, 77, 0),
        ({"vocab_size": 76, "tokenizer_type": "NullTokenizer", "padded_vocab_size": 128}, None, 77, 0),
        ({"vocab_size": None, "padded_vocab_size": 128}, None, 128, 1),
        ({"vocab_size": None, "padded_vocab_size": 128}, 100, 100, 0),
    ],
)
def test_vocab_size_from_args(changes: Mapping[str, Any], requested: int | None, rows: int, notes: int) -> None:
    result, found_notes = architecture_from_args(args_of(PLAIN) | changes, requested)
    assert (result.vocab_size, len(found_notes)) == (rows, notes)
    with pytest.raises(UsageError, match="has 128 rows"):
        architecture_from_args(args_of(PLAIN) | changes, 129)


def test_yarn_with_other_mscale() -> None:
    args = args_of(LATENT.with_settings({"rope_scaling": YARN})) | {"mscale": 0.5, "mscale_all_dim": 0.0}
    scaling = architecture_from_args(args)[0].rotary.rope_scaling
    assert scaling is not None and scaling.mscale is None
    assert scaling.attention_factor == pytest.approx(0.05 * 3.688879454 + 1)
