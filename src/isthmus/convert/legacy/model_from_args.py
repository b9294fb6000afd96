"""Which model a checkpoint of Megatron-LM holds, from the arguments in it alone.

The other direction is ``megatron_args``. What an argument is taken for that a checkpoint does not
have is what the parser of core_v0.16.1 gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from isthmus.convert.legacy.megatron_args import CLAMPED_SWIGLU, ROPE_SCALING, YARN
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, Mla, Moe, RopeScaling

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "squared_relu": (False,),
    "use_legacy_models": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "qk_l2_norm": (False,),
    "use_mup": (False,),
    "spec": (),
    "experimental_attention_variant": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (False,),
    "hybrid_attention_ratio": (0.0,),
    "hybrid_mlp_ratio": (0.0,),
    "moe_latent_size": (),
    "moe_apply_probs_on_input": (False,),
    "moe_router_force_load_balancing": (False,),
    "rotary_seq_len_interpolation_factor": (1,),
    "softmax_type": ("vanilla", "learnable"),
    "position_embedding_type": ("rope", "learned_absolute"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "rope_type": ("rope", "yarn"),
    "moe_router_score_function": ("softmax", "sigmoid"),
}
"""Arguments that change the arithmetic, and the values (None is one always) with which it can be said here."""


def architecture_of(args: Mapping[str, Any], vocab_size: int | None = None) -> tuple[Architecture, list[str]]:
    """The model that Megatron-LM builds from these arguments, and what the user has to know about it.

    Args:
        args: what a checkpoint has as ``args``, by name.
        vocab_size: rows of the embedding that are not padding; None takes them from the arguments.

    Raises:
        DataError: an argument is missing or makes no sense.
        UsageError: one asks for arithmetic that is not built here, or that no family has words for.
    """
    said = _Said(args)
    said.refuse()
    vocab, notes = _vocabulary(said, vocab_size)
    heads, hidden, num_layers = (said.number(name) for name in ("num_attention_heads", "hidden_size", "num_layers"))
    groups = said.number("num_query_groups") if said.get("group_query_attention", False) else heads
    biases = said.get("add_bias_linear", not said.get("disable_bias_linear", False))
    mla = _latent(said)
    moe = _experts(said, num_layers, biases)
    position = "learned" if said.get("position_embedding_type", "learned_absolute") == "learned_absolute" else "rope"
    arch = Architecture(
        family="",
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=said.number("ffn_hidden_size"),
        num_attention_heads=heads,
        num_query_groups=groups if mla is None else heads,
        kv_channels=(
            said.number("kv_channels", hidden // heads) if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
        ),
        vocab_size=vocab,
        max_position_embeddings=said.number("max_position_embeddings"),
        norm_epsilon=said.epsilon(),
        position="learned" if position == "learned" else "rope",
        **(_rotary(said, num_layers, latent=mla is not None) if position == "rope" else {}),
        normalization=said.get("normalization", "LayerNorm"),
        norm_zero_centered=bool(said.get("layernorm_zero_centered_gamma", said.get("apply_layernorm_1p", False))),
        qkv_bias=mla is None and bool(biases or said.get("add_qkv_bias", False)),
        proj_bias=biases,
        qk_norm=mla is None and bool(said.get("qk_layernorm", False)),
        **_window(said, num_layers),
        attention_sinks=said.get("softmax_type", "vanilla") == "learnable",
        mla=mla,
        **_activation(said, biased=biases, experts=moe is not None),
        mlp_bias=biases,
        moe=moe,
        mtp_layers=said.get("mtp_num_layers", 0),
        tie_embeddings=not said.get("untie_embeddings_and_output_weights", False),
        init_std=float(said.get("init_method_std", 0.02)),
    )
    return arch, notes


class _Said:
    """The arguments by name; None counts as not told, as it does for Megatron-LM's own loader."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def get(self, name: str, default: Any = None) -> Any:
        value = self._args.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"Megatron-LM's args have {name}={value!r}, not a number above 0.")
        return value

    def epsilon(self) -> float:
        value = self.get("layernorm_epsilon", self.get("norm_epsilon"))
        if not isinstance(value, float):
            raise DataError("Megatron-LM's args have no norm_epsilon.")
        return value

    def refuse(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if (value := self.get(name)) is not None and value not in neutral:
                raise refusal(f"{name}={value!r}")
        if "sinkhorn" in self.get("moe_router_load_balancing_type", ()):
            raise refusal("moe_router_load_balancing_type=sinkhorn")


def refusal(what: str) -> UsageError:
    """For a model that no family has words for."""
    return UsageError(f"Megatron-LM's args have {what}, for which no family here has words.")


def _vocabulary(said: _Said, asked: int | None) -> tuple[int, list[str]]:
    padded = said.number("padded_vocab_size")
    if asked is not None:
        if not 0 < asked <= padded:
            raise UsageError(f"--vocab-size {asked}: the embedding has {padded} rows. Give a number up to that.")
        return asked, []
    if (told := said.get("vocab_size")) is not None:
        # The tokenizer that stands for none adds its end of text to them.
        rows: int = told + (said.get("tokenizer_type") == "NullTokenizer")
        if rows <= padded:
            return rows, []
    return padded, [
        f"nothing says how many of the {padded} rows of the embedding are padding: all are kept. "
        "Give --vocab-size N, or the model's config: --hf-like DIR."
    ]


def _rotary(said: _Said, num_layers: int, *, latent: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rotary_base": float(said.get("rotary_base", 10000)),
        "rotary_percent": float(said.get("rotary_percent", 1.0)),
        # Latent attention always turns pairs of neighbours.
        "rotary_interleaved": latent or bool(said.get("rotary_interleaved", False)),
        "unrotated_layers": tuple(_chosen(said, "no_rope_freq", num_layers, every=lambda layer, n: layer % n == 0)),
    }
    if said.get("use_rope_scaling", False) and not latent:
        factor = said.get("rope_scaling_factor", ROPE_SCALING.factor)
        if factor != ROPE_SCALING.factor:
            raise UsageError(
                f"Megatron-LM's args have rope_scaling_factor={factor:g}, which no release hands on to the model: "
                f"it rotates with {ROPE_SCALING.factor:g}."
            )
        found["rope_scaling"] = ROPE_SCALING
    factor = float(said.get("rotary_scaling_factor", 1.0))
    if latent and said.get("rope_type", "yarn") == "yarn" and factor > 1:
        found["rope_scaling"] = _yarn(said, factor)
    return found


def _yarn(said: _Said, factor: float) -> RopeScaling:
    context, fast, slow = YARN
    weight, of_all = float(said.get("mscale", 1.0)), float(said.get("mscale_all_dim", 0.0))
    numbers: dict[str, Any] = {}
    if weight and of_all:
        numbers = {"mscale": weight, "mscale_all_dim": of_all}
    elif (weight, of_all) != (1.0, 0.0):
        sharper = [0.1 * each * math.log(factor) + 1.0 for each in (weight, of_all)]
        numbers = {"mscale_all_dim": of_all or None, "attention_factor": sharper[0] / sharper[1]}
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=int(said.get("original_max_position_embeddings", context)),
        beta_fast=float(said.get("beta_fast", fast)),
        beta_slow=float(said.get("beta_slow", slow)),
        **numbers,
    )


def _window(said: _Said, num_layers: int) -> dict[str, Any]:
    window = said.get("window_size")
    if window is None or window[0] < 0:
        return {}
    if tuple(window)[1] != 0:
        raise refusal(f"window_size={tuple(window)}")
    if said.get("window_attn_skip_freq") is None:
        return {"sliding_window": window[0] + 1}
    windowed = _chosen(said, "window_attn_skip_freq", num_layers, every=lambda layer, n: layer % n != 0)
    full = tuple(layer for layer in range(num_layers) if layer not in windowed)
    return {"sliding_window": window[0] + 1, "full_attention_layers": full} if windowed else {}


def _activation(said: _Said, *, biased: bool, experts: bool) -> dict[str, Any]:
    if said.get("swiglu", False):
        return {"activation": "silu"}
    if said.get("quick_geglu", False):
        asked = {name: said.get(name) for name in CLAMPED_SWIGLU}
        if asked != CLAMPED_SWIGLU:
            raise refusal(" ".join(f"{name}={value}" for name, value in asked.items()))
        return {"activation": "clamped_swiglu"}
    # The kernel that adds the bias approximates; experts run without it.
    fused = biased and not experts and said.get("bias_gelu_fusion", True)
    return {"activation": "gelu_tanh" if fused else "gelu", "gated": False}


def _latent(said: _Said) -> Mla | None:
    if not said.get("multi_latent_attention", False):
        return None
    if not said.get("qk_layernorm", False):
        raise refusal("multi_latent_attention=True and qk_layernorm=False")
    return Mla(
        kv_lora_rank=said.number("kv_lora_rank", 32),
        qk_nope_head_dim=said.number("qk_head_dim", 128),
        qk_rope_head_dim=said.number("qk_pos_emb_head_dim", 64),
        v_head_dim=said.number("v_head_dim", 128),
        q_lora_rank=said.get("q_lora_rank"),
        norm_epsilon=said.epsilon(),
    )


def _experts(said: _Said, num_layers: int, biased: bool) -> Moe | None:
    if not (number := said.get("num_experts", 0)):
        return None
    frequency = said.get("moe_layer_freq", 1)
    with_experts = (
        _chosen(said, "moe_layer_freq", num_layers, every=lambda layer, n: (layer - 1) % n == 0)
        if frequency != 1
        else list(range(num_layers))
    )
    top_k, groups = said.number("moe_router_topk", 2), said.get("moe_router_group_topk", 0)
    sigmoid = said.get("moe_router_score_function", "softmax") == "sigmoid"
    grouping: dict[str, Any] = {}
    if groups:
        best = top_k // groups
        before = sigmoid or said.get("moe_router_pre_softmax", False)
        if best not in (1, 2) or not before:
            raise refusal(f"moe_router_group_topk={groups} and moe_router_topk={top_k}")
        grouping = {"num_groups": said.number("moe_router_num_groups"), "group_top_k": groups}
        grouping["group_score"] = "max" if best == 1 else "top2"
    shared = said.get("moe_shared_expert_intermediate_size", 0)
    return Moe(
        num_experts=number,
        top_k=top_k,
        ffn_hidden_size=said.number("moe_ffn_hidden_size", said.get("ffn_hidden_size")),
        shared_ffn_hidden_size=shared,
        shared_gate=bool(shared and said.get("moe_shared_expert_gate", False)),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in with_experts),
        score="sigmoid" if sigmoid else "softmax",
        normalize=top_k > 1 if sigmoid else not said.get("moe_router_pre_softmax", False),
        scaling_factor=float(said.get("moe_router_topk_scaling_factor", 1.0)),
        expert_bias=bool(said.get("moe_router_enable_expert_bias", False)),
        router_bias=biased,
        expert_mlp_bias=biased,
        **grouping,
    )


def _chosen(said: _Said, name: str, num_layers: int, *, every: Any) -> list[int]:
    """Layers, from 0, that a pattern marks with 1, or that a frequency falls on; ``every`` counts layers from 1."""
    frequency = said.get(name)
    if frequency is None:
        return []
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0:
        return [layer for layer in range(num_layers) if every(layer + 1, frequency)]
    if not isinstance(frequency, list) or len(frequency) != num_layers:
        raise DataError(f"Megatron-LM's args have {name}={frequency!r}, which does not fit {num_layers} layers.")
    return [layer for layer, mark in enumerate(frequency) if mark]
