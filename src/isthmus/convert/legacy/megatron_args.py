"""The arguments that Megatron-LM keeps in a checkpoint: its loader takes most of the model from them.

Names and meaning are those of Megatron-LM core_v0.16.1: ``megatron/training/arguments.py`` names them,
``load_args_from_checkpoint`` in ``checkpointing.py`` takes some of them from a checkpoint, and ``gpt_builders.py`` with
``core_transformer_config_from_args`` makes a model of them. :mod:`isthmus.convert.legacy.model_from_args` reads them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from isthmus.convert.legacy.legacy_layout import Grid
from isthmus.families.architecture import Architecture, Moe, RopeScaling

NOT_RESTORED: dict[str, tuple[str, Any]] = {
    "layernorm_epsilon": ("--norm-epsilon", 1e-5),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", False),
    "qk_layernorm": ("--qk-layernorm", False),
    "window_size": ("--window-size", None),
    "window_attn_skip_freq": ("--window-attn-skip-freq", None),
    "no_rope_freq": ("--no-rope-freq", None),
    "use_rope_scaling": ("--use-rope-scaling", False),
    "softmax_type": ("--softmax-type", "vanilla"),
    "bias_gelu_fusion": ("--no-bias-gelu-fusion", True),
    "quick_geglu": ("--quick-geglu", False),
    "activation_func_clamp_value": ("--activation-func-clamp-value", None),
    "glu_linear_offset": ("--glu-linear-offset", 0.0),
    "moe_shared_expert_gate": ("--moe-shared-expert-gate", False),
    "moe_router_num_groups": ("--moe-router-num-groups", None),
    "moe_router_group_topk": ("--moe-router-group-topk", None),
    "moe_router_dtype": ("--moe-router-dtype", None),
    "multi_latent_attention": ("--multi-latent-attention", False),
    "q_lora_rank": ("--q-lora-rank", None),
    "kv_lora_rank": ("--kv-lora-rank", 32),
    "qk_head_dim": ("--qk-head-dim", 128),
    "qk_pos_emb_head_dim": ("--qk-pos-emb-head-dim", 64),
    "v_head_dim": ("--v-head-dim", 128),
    "rope_type": ("--rope-type", None),
    "rotary_scaling_factor": ("--rotary-scaling-factor", 1.0),
    "mscale": ("--mscale", 1.0),
    "mscale_all_dim": ("--mscale-all-dim", 0.0),
    "mtp_num_layers": ("--mtp-num-layers", None),
}
"""Arguments of a model that ``load_args_from_checkpoint`` passes over: their flags and what the parser gives them.

``layernorm_1p`` is among them because the loader looks for it under the name that it had before.
"""
ROPE_SCALING = RopeScaling(kind="llama3", factor=8.0)
"""The one that ``--use-rope-scaling`` turns on: no release hands ``--rope-scaling-factor`` on to the model."""
YARN = (4096, 32.0, 1.0)
"""Length that YaRN stretches, ``beta_fast`` and ``beta_slow``; there are no flags for them."""
CLAMPED_SWIGLU = {"quick_geglu": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
_NO_SWITCH: tuple[tuple[str, Callable[[Architecture], bool]], ...] = (
    ("layers of the form '{0.form}'", lambda arch: arch.form != "pre"),
    ("norms without a bias", lambda arch: arch.normalization == "LayerNorm" and not arch.norm_bias),
    ("a norm over all heads together", lambda arch: arch.qk_norm and arch.qk_norm_over == "projection"),
    ("another epsilon in latent attention", lambda arch: arch.mla is not None and _epsilon(arch) != arch.norm_epsilon),
    ("rotary pairs of halves in latent attention", lambda arch: arch.mla is not None and not arch.rotary_interleaved),
    ("rope scaling '{0.rope_scaling.kind}' with these numbers", lambda arch: not _rope_can_be_said(arch)),
    ("another rotary base in layers with a window", lambda arch: arch.window_rotary_base is not None),
    ("attention_scale={0.attention_scale:g}", lambda arch: arch.attention_scale not in (None, arch.kv_channels**-0.5)),
    ("attention_softcap={0.attention_softcap:g}", lambda arch: arch.attention_softcap is not None),
    ("biases in these linear layers alone", lambda arch: has_biases(arch) is None),
    ("this activation ({0.activation})", lambda arch: _activation(arch) is None),
    ("this way to choose experts", lambda arch: arch.moe is not None and _routing(arch.moe) is None),
    ("embedding_multiplier={0.embedding_multiplier:g}", lambda arch: arch.embedding_multiplier != 1),
    ("residual_multiplier={0.residual_multiplier:g}", lambda arch: arch.residual_multiplier != 1),
    ("logits_multiplier={0.logits_multiplier:g}", lambda arch: arch.logits_multiplier != 1),
    ("logits_softcap={0.logits_softcap:g}", lambda arch: arch.logits_softcap is not None),
)


def without_switch(arch: Architecture) -> list[str]:
    """What of a model Megatron-LM 0.16.1 has no switch for and would do otherwise; empty if it can build it."""
    return [words.format(arch) for words, lacks in _NO_SWITCH if lacks(arch)]


def flags_to_give(arch: Architecture) -> list[str]:
    """Flags that Megatron-LM 0.16.1 needs for this model beside ``--use-checkpoint-args``, ready for a shell."""
    said = model_args(arch)
    given = {name: said[name] for name, (_, default) in NOT_RESTORED.items() if name in said and said[name] != default}
    return [_flag(NOT_RESTORED[name][0], value) for name, value in given.items()]


def _flag(flag: str, value: Any) -> str:
    match value:
        case bool():
            return flag
        case list():
            return f"{flag} '[{','.join(map(str, value))}]'"
        case tuple():
            return f"{flag} {','.join(map(str, value))}"
        case _:
            return f"{flag} {value}"


def megatron_args(
    arch: Architecture,
    dtype: torch.dtype,
    *,
    grid: Grid | None = None,
    padded_vocab_size: int | None = None,
    spelling: str = "te",
) -> Namespace:
    """``args`` of a checkpoint that holds the weights of ``arch`` in ``dtype``.

    Args:
        arch: the model.
        dtype: of its tensors.
        grid: ranks of a legacy checkpoint; None for ``torch_dist``, which has none.
        padded_vocab_size: rows of the embedding over all ranks; None where it is not padded.
        spelling: ``te`` or ``local``, whose names a legacy checkpoint has.
    """
    which: dict[str, Any] = {"ckpt_format": "torch_dist" if grid is None else "torch"}
    if grid is not None and arch.moe is not None:
        which["moe_grouped_gemm"] = spelling == "te"  # a torch_dist is read with it and without
    grid = grid or Grid()
    return Namespace(
        **model_args(arch),
        **which,
        transformer_impl="transformer_engine" if spelling == "te" else "local",
        iteration=0,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.expert_tp,
        context_parallel_size=1,
        world_size=len(grid.files()),
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        # Its loader would take a type of tokenizer from here in place of the one that the user names.
        tokenizer_type=None,
        tokenizer_model=None,
        vocab_size=arch.vocab_size,
        padded_vocab_size=padded_vocab_size or arch.vocab_size,
        make_vocab_size_divisible_by=1,
    )


def model_args(arch: Architecture) -> dict[str, Any]:
    """The arguments that say the model, as far as there are words for it, see :func:`without_switch`."""
    biases = bool(has_biases(arch))
    layers = range(arch.num_layers)
    windows = [int(arch.window(layer) is not None) for layer in layers]
    args: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "group_query_attention": arch.mla is None and arch.num_query_groups != arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.kv_channels,
        "seq_length": arch.max_position_embeddings,
        "max_position_embeddings": arch.max_position_embeddings,
        "normalization": arch.normalization,
        "layernorm_epsilon": arch.norm_epsilon,
        "norm_epsilon": arch.norm_epsilon,  # its name before 0.16
        "layernorm_zero_centered_gamma": arch.norm_zero_centered,
        "apply_layernorm_1p": arch.norm_zero_centered,  # its name before 0.16
        "add_bias_linear": biases,
        "add_qkv_bias": biases or arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or arch.mla is not None,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "softmax_type": "learnable" if arch.attention_sinks else "vanilla",
        "window_size": None if arch.sliding_window is None else (arch.sliding_window - 1, 0),
        "window_attn_skip_freq": windows if len(set(windows)) > 1 else None,
        "init_method_std": arch.init_std,
        "squared_relu": False,
        "swiglu": False,
        **(_activation(arch) or {}),
        **_position_args(arch),
        "untie_embeddings_and_output_weights": not arch.tie_embeddings,
        "mtp_num_layers": arch.mtp_layers or None,
        "num_experts": None,
        **_latent_args(arch),
    }
    if (moe := arch.moe) is not None:
        moe_layers = [int(arch.is_moe(layer)) for layer in layers]
        args |= {
            "num_experts": moe.num_experts,
            # A list says that layers differ, and gives each of them keys of its own.
            "moe_layer_freq": 1 if all(moe_layers) else moe_layers,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_router_topk": moe.top_k,
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1 else None,
            "moe_router_enable_expert_bias": moe.expert_bias,
            "moe_router_dtype": "fp32" if moe.router_float32 else None,
            **(_routing(moe) or {}),
        }
    return args


def has_biases(arch: Architecture) -> bool | None:
    """Whether all linear layers have biases, or none but perhaps those of attention's inputs; None if it is neither."""
    found = {arch.proj_bias} | ({arch.mlp_bias} if arch.moe is None or arch.moe.dense_layers else set())
    if arch.moe is not None:
        found |= {arch.moe.expert_mlp_bias, arch.moe.router_bias}
    if found == {True}:
        return True if arch.qkv_bias else None
    return False if found == {False} else None


def _activation(arch: Architecture) -> dict[str, Any] | None:
    fused = has_biases(arch) and arch.moe is None
    match arch.activation, arch.gated:
        case "silu", True:
            return {"swiglu": True}
        case "clamped_swiglu", True:
            return {"swiglu": False, **CLAMPED_SWIGLU}
        case "gelu", False:
            return {"swiglu": False, "bias_gelu_fusion": False}
        case "gelu_tanh", False if fused:
            return {"swiglu": False, "bias_gelu_fusion": True}  # the fused kernel is the approximation
    return None


def _position_args(arch: Architecture) -> dict[str, Any]:
    scaling = arch.rope_scaling
    skipped = [int(layer in arch.unrotated_layers) for layer in range(arch.num_layers)]
    return {
        "position_embedding_type": "rope" if arch.position == "rope" else "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(arch.rotary_base) if arch.rotary_base.is_integer() else arch.rotary_base,
        "rotary_percent": arch.rotary_percent,
        "rotary_interleaved": arch.rotary_interleaved and arch.mla is None,
        "no_rope_freq": skipped if any(skipped) else None,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling and scaling.kind == "llama3" else ROPE_SCALING.factor,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling and scaling.kind == "linear" else None,
    }


def _epsilon(arch: Architecture) -> float:
    return arch.norm_epsilon if arch.mla is None else arch.mla.norm_epsilon


def _latent_args(arch: Architecture) -> dict[str, Any]:
    if (mla := arch.mla) is None:
        return {"multi_latent_attention": False}
    scaling = arch.rope_scaling
    args: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope" if scaling is None else "yarn",
    }
    if scaling is not None:
        weights = _yarn_weights(scaling) or (1.0, 0.0)
        args |= {"rotary_scaling_factor": scaling.factor, "mscale": weights[0], "mscale_all_dim": weights[1]}
        args |= {"original_max_position_embeddings": scaling.original_max_position_embeddings}
        args |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return args


def _yarn_weights(scaling: RopeScaling) -> tuple[float, float] | None:
    """``mscale`` and ``mscale_all_dim`` with which YaRN sharpens there as it does here; None if there are none.

    Megatron-LM multiplies cosines by the ratio of what the two give, with one standing for a first that is not told.
    """
    if scaling.attention_factor is not None:
        return None
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.mscale, scaling.mscale_all_dim
    return None if scaling.mscale_all_dim else (1.0, 0.0)


def _rope_can_be_said(arch: Architecture) -> bool:
    if (scaling := arch.rope_scaling) is None:
        return True
    if arch.mla is None:
        return scaling == ROPE_SCALING
    told = (scaling.kind, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow)
    return told == ("yarn", *YARN) and scaling.truncate and _yarn_weights(scaling) is not None


def _routing(moe: Moe) -> dict[str, Any] | None:
    grouped = moe.num_groups > 1
    groups: dict[str, Any] = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if grouped:
        # It judges a group by its best topk/group_topk experts, added up.
        best, wanted = moe.top_k // moe.group_top_k, 1 if moe.group_score == "max" else 2
        if best != wanted:
            return None
        groups = {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.group_top_k}
    if moe.score == "sigmoid":
        if moe.normalize != (moe.top_k > 1):
            return None
        return {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False, **groups}
    if moe.expert_bias:
        return None
    # The softmax of the chosen is that of all, divided by what is chosen; but it would choose groups by the logits.
    after = moe.score == "softmax_of_chosen" or moe.normalize
    if after and (grouped or moe.top_k == 1):
        return None
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not after, **groups}
