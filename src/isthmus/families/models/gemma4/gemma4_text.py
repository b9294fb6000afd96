"""Gemma 4, the text model: other attention sizes without a window, values that are keys, scaled layers, experts."""

from isthmus.families.family import Family, Fixed, Key, without
from isthmus.families.models import gemma
from isthmus.families.models.gemma4 import branch_experts, key_sharing, per_layer_inputs
from isthmus.families.models.gemma4.layer_overrides import full_attention_heads, full_attention_size
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import HF_LAYER, LAYER, flag, in_layer, layer_norm, number
from isthmus.families.rules.rule import in_layers
from isthmus.families.rules.sliding_window import Pattern, Window

_HEADS, _WIDTH = Key("num_key_value_heads", default=4), Key("head_dim", default=256)
_WINDOW: tuple[Window, Pattern] = ("pattern_and_last", lambda _hf, layers: range(5, layers, 6))
"""Unlike Gemma 3, without a key for the period."""

FAMILY = Family(
    name="gemma4_text",
    hf_architecture="Gemma4ForCausalLM",
    keys=without(decoder.KEYS, "num_query_groups", "kv_channels")
    | {
        "hidden_size": Key("hidden_size", default=2304),
        "ffn_hidden_size": Key("intermediate_size", default=9216),
        "num_layers": Key("num_hidden_layers", default=30),
        "num_attention_heads": Key("num_attention_heads", default=8),
        "vocab_size": Key("vocab_size", default=262144),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "window_attention.num_query_groups": _HEADS,
        "window_attention.kv_channels": _WIDTH,
        "values_are_keys": flag("attention_k_eq_v"),
        "sharing_layers_wide": flag("use_double_wide_mlp"),
        "activation": decoder.activation("hidden_activation", default="gelu_pytorch_tanh"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "logits_softcap": number("final_logit_softcapping", None, optional=True),
    },
    derived={
        "num_query_groups": full_attention_size(_HEADS, full_attention_heads(_HEADS), _WINDOW),
        "kv_channels": full_attention_size(_WIDTH, Key("global_head_dim", default=512).read, _WINDOW),
        "embedding_multiplier": gemma.EMBEDDING_SCALE,
        "moe": branch_experts.MOE,
        "key_sharing_layers": key_sharing.sharing_layers(*_WINDOW),
        "layer_input_size": per_layer_inputs.SIZE,
    },
    fixed=decoder.PLAIN_FIXED
    | {
        "use_bidirectional_attention": Fixed((None, "vision"), "attention between all tokens is not supported"),
        "attention_bias": Fixed((False,), "biases of attention are not supported for this family"),
    },
    traits={
        "form": "sandwich",
        "qk_norm": True,
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scalars": True,
        "window_attention.values_are_keys": False,
    },
    sliding_window=_WINDOW[0],
    sliding_window_default=512,
    sliding_window_pattern=_WINDOW[1],
    rope_defaults={
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
    flat_rope=False,
    unused=key_sharing.UNUSED,
    rules=(
        *decoder.EMBEDDING,
        *per_layer_inputs.EMBEDDING,
        *decoder.INPUT_NORM,
        *key_sharing.ATTENTION,
        *layer_norm("post_self_attn_layernorm", "post_attention_layernorm"),
        *in_layers("dense|wide", *layer_norm("pre_mlp_layernorm", "pre_feedforward_layernorm")),
        *layer_norm("post_mlp_layernorm", "post_feedforward_layernorm"),
        in_layer("layer_scalar", "layer_scalar", "1", init="plain_ones", trained=False),
        *expert_tensors.DENSE,
        *in_layers("wide", *decoder.mlp(LAYER + "mlp.", HF_LAYER + "mlp.", "2*F")),
        *per_layer_inputs.RULES,
        *branch_experts.RULES,
        *decoder.HEAD,
    ),
)
