"""Apertus: QK norms, and an MLP without gate whose activation, xIELU, has learned parameters in each layer."""

from typing import Any

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import in_layer
from isthmus.families.rules.rule import Rule, renamed


def _parameter(name: str, init: float, **fields: Any) -> Rule:
    return in_layer(f"mlp.activation_func.{name}", f"mlp.act_fn.{name}", "1", init=init, **fields)


_XIELU = (
    _parameter("alpha_p", 0.2036),  # inverse softplus of 0.8
    _parameter("alpha_n", -1.0502),  # inverse softplus of 0.8 less beta
    _parameter("beta", 0.5, trained=False, scalar=True),
    _parameter("eps", -1e-6, trained=False, scalar=True),
)

FAMILY = Family(
    name="apertus",
    hf_architecture="ApertusForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=65536, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | {"activation": Key("hidden_act", default="xielu", choices={"xielu": "xielu"})},
    fixed=decoder.PLAIN_FIXED,
    traits={"qk_norm": True, "gated": False},
    rope_defaults={
        "rope_theta": 12000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    rules=renamed(
        decoder.pre_norm_rules(mlp=(*decoder.MLP, *_XIELU)),
        {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    ),
)
