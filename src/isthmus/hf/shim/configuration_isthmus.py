"""Config of an ``isthmus`` model: all sizes and variants of its decoder."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

# The keys of config.json and their defaults. They are not annotated class attributes, because transformers 5 would
# then omit those with default values when it saves the config.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,  # of dense feed-forward blocks
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": None,  # None: num_attention_heads
    "head_dim": None,  # None: hidden_size // num_attention_heads
    "max_position_embeddings": 2048,
    # Positions.
    "position_embedding_type": "rope",  # or "learned"
    # rope_type (default, linear, llama3, yarn, longrope), rope_theta, partial_rotary_factor, settings of the type.
    # The older keys rope_theta and rope_scaling are read too.
    "rope_parameters": None,
    "rotary_interleaved": False,  # rotary pairs are adjacent channels; otherwise one channel of each half
    "window_rope_theta": None,  # of sliding-window layers, without scaling; None: as in other layers
    "unrotated_layers": None,  # indices of layers without rotary embedding
    # Norms.
    "normalization": "RMSNorm",  # or "LayerNorm"
    "norm_epsilon": 1e-5,
    "norm_bias": True,  # of LayerNorm
    "norm_zero_centered": False,  # norms multiply by one plus their weight
    # Placement of norms: "pre", "post", "sandwich", "parallel" (attention and feed-forward block in parallel after one
    # norm) or "parallel_two_norms".
    "layer_form": "pre",
    # Attention.
    "qkv_bias": False,
    "proj_bias": False,  # of the output projection
    "qk_norm": False,
    "qk_norm_over": "head",  # or "projection": RMSNorm over all heads
    "sliding_window": None,  # keys per query, including its own
    "layer_types": None,  # "full_attention" or "sliding_attention" per layer; None: all full
    "attention_scale": None,  # None: 1/sqrt(head_dim)
    "attention_softcap": None,  # scores become softcap * tanh(scores / softcap)
    "attention_sinks": False,  # one learned logit per head in the softmax, without a value
    # Feed-forward block.
    "hidden_act": "silu",  # or "gelu", "gelu_pytorch_tanh", "clamped_swiglu"
    "gated_mlp": True,  # act(gate(x)) * up(x); otherwise act(up(x))
    "mlp_bias": False,  # of dense feed-forward blocks
    # Mixture of experts.
    "num_experts": 0,  # 0: dense model
    "num_experts_per_tok": 2,
    "moe_intermediate_size": None,  # of one expert; None: intermediate_size
    "shared_expert_intermediate_size": 0,  # of all shared experts together
    "shared_expert_gate": False,  # a sigmoid gate on the output of the shared experts
    "mlp_only_layers": None,  # indices of layers with a dense feed-forward block
    "scoring_func": "softmax",  # or "sigmoid", of all logits; or "softmax_of_chosen"
    "norm_topk_prob": False,  # weights of the selected experts are divided by their sum
    "norm_topk_min": 1e-20,  # lower bound of the divisor
    "routed_scaling_factor": 1.0,  # multiplier of the final weights
    "router_expert_bias": False,  # a bias that affects the selection of experts but not their weights
    "n_group": 1,
    "topk_group": 1,  # experts are selected from this number of groups
    "group_score": "top2",  # sum of the two best experts; or "max"
    "router_bias": False,
    "router_float32": False,  # the router's weights are always float32
    "expert_mlp_bias": False,
    "moe_output_bias": False,  # a bias that is added to the weighted sum of the experts' outputs
    # Embedding and logits.
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,  # of the outputs of attention and feed-forward block
    "logits_multiplier": 1.0,
    "logits_softcap": None,
    "initializer_range": 0.02,
}


class IsthmusConfig(PretrainedConfig):  # type: ignore[misc, unused-ignore]  # transformers is typed in part
    """Config of a decoder-only model; the keyword arguments are the keys of ``DEFAULTS``."""

    model_type = "isthmus"
    _auto_class = "AutoConfig"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, **kwargs: Any) -> None:
        rope_theta, rope_scaling = kwargs.pop("rope_theta", None), kwargs.pop("rope_scaling", None)
        keys = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        keys["num_key_value_heads"] = keys["num_key_value_heads"] or keys["num_attention_heads"]
        keys["head_dim"] = keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"]
        keys["moe_intermediate_size"] = keys["moe_intermediate_size"] or keys["intermediate_size"]
        keys["layer_types"] = keys["layer_types"] or ["full_attention"] * keys["num_hidden_layers"]
        keys["unrotated_layers"] = keys["unrotated_layers"] or []
        keys["mlp_only_layers"] = keys["mlp_only_layers"] or []
        rope = dict(keys["rope_parameters"] or rope_scaling or {"rope_type": "default"})
        rope["rope_theta"] = rope.get("rope_theta") or rope_theta or 10000.0
        rope.setdefault("partial_rotary_factor", kwargs.pop("partial_rotary_factor", 1.0))
        keys["rope_parameters"] = rope
        for name, value in keys.items():
            setattr(self, name, value)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
