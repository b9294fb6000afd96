"""Derives an architecture from Megatron-LM's args, the inverse of ``megatron_args``.

Missing args have the defaults of core_v0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.convert.family_matching import match_family
from isthmus.convert.legacy.megatron_args import CLAMPED_SWIGLU, ROPE_SCALING, YARN
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, from_settings
from isthmus.families.blocks.block import MAX_INT, check_sizes
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.rotary import RopeScaling

_MUST_BE_FALSE = (
    *("squared_relu", "use_legacy_models", "apply_residual_connection_post_layernorm", "attention_output_gate"),
    *("qk_l2_norm", "use_mup", "is_hybrid_model", "moe_apply_probs_on_input", "moe_router_force_load_balancing"),
)
_MUST_BE_UNSET = (
    *("spec", "experimental_attention_variant", "hybrid_override_pattern", "moe_latent_size"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_MUST_BE_FALSE, (False,)),
    **dict.fromkeys(_MUST_BE_UNSET, ()),
    "hybrid_attention_ratio": (0.0,),
    "hybrid_mlp_ratio": (0.0,),
    "rotary_seq_len_interpolation_factor": (1,),
    "softmax_type": ("vanilla", "learnable"),
    "position_embedding_type": ("rope", "learned_absolute"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "rope_type": ("rope", "yarn"),
    "moe_router_score_function": ("softmax", "sigmoid"),
}
"""Args that change the model, with their supported values; None is always supported."""


def config_from_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of the family that expresses the args exactly."""
    family, arch, _ = match_family(architecture_from_args(args)[0])
    return family.to_hf_config(arch)


def architecture_from_args(args: Mapping[str, Any], vocab_size: int | None = None) -> tuple[Architecture, list[str]]:
    """The model that Megatron-LM builds from these args, and notes for the user.

    ``vocab_size`` is the number of embedding rows without padding; None reads it from the args. A DataError or
    UsageError if an arg is missing, invalid or not supported.
    """
    try:
        return _architecture(args, vocab_size)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise DataError(f"Megatron-LM's args have a value of another type: {error}.") from error


def _architecture(args: Mapping[str, Any], vocab_size: int | None) -> tuple[Architecture, list[str]]:
    known = ArgsReader(args)
    known.check_supported()
    vocab, notes = _vocabulary(known, vocab_size)
    heads, hidden, num_layers = (known.number(name) for name in ("num_attention_heads", "hidden_size", "num_layers"))
    check_sizes(layers=num_layers)  # before they are enumerated
    groups = known.number("num_query_groups") if known.get("group_query_attention", False) else heads
    biases = known.get("add_bias_linear", not known.get("disable_bias_linear", False))
    mla = _latent(known)
    moe = _experts(known, num_layers, biases)
    learned = known.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    settings: dict[str, Any] = {
        "family": "",
        "num_layers": num_layers,
        "hidden_size": hidden,
        "ffn_hidden_size": known.number("ffn_hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups if mla is None else heads,
        "kv_channels": (
            known.number("kv_channels", hidden // heads) if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
        ),
        "vocab_size": vocab,
        "max_position_embeddings": known.number("max_position_embeddings"),
        "norm_epsilon": known.epsilon(),
        "position": "learned" if learned else "rope",
        **({} if learned else _rotary(known, num_layers, latent=mla is not None)),
        "normalization": known.get("normalization", "LayerNorm"),
        "norm_zero_centered": bool(known.get("layernorm_zero_centered_gamma", known.get("apply_layernorm_1p", False))),
        "qkv_bias": mla is None and bool(biases or known.get("add_qkv_bias", False)),
        "proj_bias": biases,
        "qk_norm": mla is None and bool(known.get("qk_layernorm", False)),
        **_window(known, num_layers),
        "attention_sinks": known.get("softmax_type", "vanilla") == "learnable",
        "mla": mla,
        **_activation(known, biased=biases, experts=moe is not None),
        "mlp_bias": biases,
        "moe": moe,
        "mtp_layers": known.get("mtp_num_layers", 0),
        "tie_embeddings": not known.get("untie_embeddings_and_output_weights", False),
        "init_std": float(known.get("init_method_std", 0.02)),
    }
    return from_settings(settings), notes


def _vocabulary(args: ArgsReader, requested: int | None) -> tuple[int, list[str]]:
    padded = args.number("padded_vocab_size")
    if requested is not None:
        if not 0 < requested <= padded:
            raise UsageError(f"--vocab-size {requested}: the embedding has {padded} rows. Give a number up to that.")
        return requested, []
    if (vocab_size := args.get("vocab_size")) is not None:
        # NullTokenizer adds an end-of-text token.
        rows: int = vocab_size + (args.get("tokenizer_type") == "NullTokenizer")
        if rows <= padded:
            return rows, []
    return padded, [
        f"it is unknown how many of the {padded} rows of the embedding are padding: all are kept. "
        "Give --vocab-size N, or the model's config: --hf-like DIR."
    ]


def _rotary(args: ArgsReader, num_layers: int, *, latent: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rotary_base": float(args.get("rotary_base", 10000)),
        "rotary_percent": float(args.get("rotary_percent", 1.0)),
        "rotary_interleaved": latent or bool(args.get("rotary_interleaved", False)),
        "unrotated_layers": tuple(args.layers("no_rope_freq", num_layers, selected=lambda layer, n: layer % n == 0)),
    }
    if args.get("use_rope_scaling", False) and not latent:
        factor = args.get("rope_scaling_factor", ROPE_SCALING.factor)
        if factor != ROPE_SCALING.factor:
            raise UsageError(
                f"Megatron-LM's args have rope_scaling_factor={factor:g}, which no release passes to the model: "
                f"it uses {ROPE_SCALING.factor:g}."
            )
        fields["rope_scaling"] = ROPE_SCALING
    factor = float(args.get("rotary_scaling_factor", 1.0))
    if latent and args.get("rope_type", "yarn") == "yarn" and factor > 1:
        fields["rope_scaling"] = _yarn(args, factor)
    return fields


def _yarn(args: ArgsReader, factor: float) -> RopeScaling:
    context, fast, slow = YARN
    mscale, mscale_all_dim = float(args.get("mscale", 1.0)), float(args.get("mscale_all_dim", 0.0))
    scales: dict[str, Any] = {}
    if mscale and mscale_all_dim:
        scales = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    elif (mscale, mscale_all_dim) != (1.0, 0.0):
        factors = [0.1 * scale * math.log(factor) + 1.0 for scale in (mscale, mscale_all_dim)]
        scales = {"mscale_all_dim": mscale_all_dim or None, "attention_factor": factors[0] / factors[1]}
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=int(args.get("original_max_position_embeddings", context)),
        beta_fast=float(args.get("beta_fast", fast)),
        beta_slow=float(args.get("beta_slow", slow)),
        **scales,
    )


def _window(args: ArgsReader, num_layers: int) -> dict[str, Any]:
    window = args.get("window_size")
    if window is None or window[0] < 0:
        return {}
    if tuple(window)[1] != 0:
        raise not_supported(f"window_size={tuple(window)}")
    if args.get("window_attn_skip_freq") is None:
        return {"sliding_window": window[0] + 1}
    windowed = args.layers("window_attn_skip_freq", num_layers, selected=lambda layer, n: layer % n != 0)
    full = tuple(layer for layer in range(num_layers) if layer not in windowed)
    return {"sliding_window": window[0] + 1, "full_attention_layers": full} if windowed else {}


def _activation(args: ArgsReader, *, biased: bool, experts: bool) -> dict[str, Any]:
    if args.get("swiglu", False):
        return {"activation": "silu"}
    if args.get("quick_geglu", False):
        values = {name: args.get(name) for name in CLAMPED_SWIGLU}
        if values != CLAMPED_SWIGLU:
            raise not_supported(" ".join(f"{name}={value}" for name, value in values.items()))
        return {"activation": "clamped_swiglu"}
    # The fused bias-GELU kernel uses the tanh approximation; experts do not use the kernel.
    fused = biased and not experts and args.get("bias_gelu_fusion", True)
    return {"activation": "gelu_tanh" if fused else "gelu", "gated": False}


def _latent(args: ArgsReader) -> Latent | None:
    if not args.get("multi_latent_attention", False):
        return None
    if not args.get("qk_layernorm", False):
        raise not_supported(
            "multi_latent_attention=True and qk_layernorm=False",
            "DeepSeek's models have these norms: for one of them train with --qk-layernorm.",
        )
    return Latent(
        kv_lora_rank=args.number("kv_lora_rank", 32),
        qk_nope_head_dim=args.number("qk_head_dim", 128),
        qk_rope_head_dim=args.number("qk_pos_emb_head_dim", 64),
        v_head_dim=args.number("v_head_dim", 128),
        q_lora_rank=args.get("q_lora_rank"),
        norm_epsilon=args.epsilon(),
    )


def _experts(args: ArgsReader, num_layers: int, biased: bool) -> Experts | None:
    if not (number := args.get("num_experts", 0)):
        return None
    moe_layers = list(range(num_layers))
    if args.get("moe_layer_freq", 1) != 1:
        moe_layers = args.layers("moe_layer_freq", num_layers, selected=lambda layer, n: (layer - 1) % n == 0)
    top_k = args.number("moe_router_topk", 2)
    sigmoid = args.get("moe_router_score_function", "softmax") == "sigmoid"
    pre_softmax = args.get("moe_router_pre_softmax", False)
    shared = args.get("moe_shared_expert_intermediate_size", 0)
    return Experts(
        num_experts=number,
        top_k=top_k,
        ffn_hidden_size=args.number("moe_ffn_hidden_size", args.get("ffn_hidden_size")),
        shared_ffn_hidden_size=shared,
        shared_gate=bool(shared and args.get("moe_shared_expert_gate", False)),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in moe_layers),
        score="sigmoid" if sigmoid else "softmax",
        normalize=top_k > 1 if sigmoid else not pre_softmax,
        scaling_factor=float(args.get("moe_router_topk_scaling_factor", 1.0)),
        expert_bias=bool(args.get("moe_router_enable_expert_bias", False)),
        router_bias=biased,
        expert_mlp_bias=biased,
        **_expert_groups(args, top_k, scores_first=sigmoid or pre_softmax),
    )


def _expert_groups(args: ArgsReader, top_k: int, *, scores_first: bool) -> dict[str, Any]:
    if not (groups := args.get("moe_router_group_topk", 0)):
        return {}
    experts_per_group = top_k // groups
    if experts_per_group not in (1, 2) or not scores_first:
        raise not_supported(f"moe_router_group_topk={groups} and moe_router_topk={top_k}")
    score = "max" if experts_per_group == 1 else "top2"
    return {"num_groups": args.number("moe_router_num_groups"), "group_top_k": groups, "group_score": score}


class ArgsReader:
    """Args by name; None counts as missing, as in Megatron-LM's loader."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def get(self, name: str, default: Any = None) -> Any:
        value = self._args.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer, else a DataError."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INT:
            raise DataError(f"Megatron-LM's args have {name}={value!r:.60}, not a number above 0.")
        return value

    def epsilon(self) -> float:
        """The epsilon of norms, renamed in 0.16."""
        value = self.get("layernorm_epsilon", self.get("norm_epsilon"))
        if not isinstance(value, float):
            raise DataError("Megatron-LM's args have no norm_epsilon.")
        return value

    def check_supported(self) -> None:
        if (length := self.get("decoder_seq_length")) is not None:
            raise UsageError(
                f"Megatron-LM's args are of an encoder-decoder model such as T5 (decoder_seq_length={length}); only "
                "decoder-only models are supported."
            )
        for name, supported in _SUPPORTED_VALUES.items():
            if (value := self.get(name)) is not None and value not in supported:
                raise not_supported(f"{name}={value!r}")
        if "sinkhorn" in self.get("moe_router_load_balancing_type", ()):
            raise not_supported("moe_router_load_balancing_type=sinkhorn")

    def layers(self, name: str, num_layers: int, *, selected: Callable[[int, int], bool]) -> list[int]:
        """Layers that a list marks with 1; for an integer frequency, those with ``selected(layer + 1, frequency)``."""
        frequency = self.get(name)
        if frequency is None:
            return []
        if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0:
            return [layer for layer in range(num_layers) if selected(layer + 1, frequency)]
        if not isinstance(frequency, list) or len(frequency) != num_layers:
            raise DataError(f"Megatron-LM's args have {name}={frequency!r}, which does not fit {num_layers} layers.")
        return [layer for layer, mark in enumerate(frequency) if mark]


def not_supported(what: str, remedy: str = "") -> UsageError:
    return UsageError(f"Megatron-LM's args have {what}, which no family can express. {remedy}".rstrip())
