"""OPT: learned positions, LayerNorms, biases in all linear layers, ReLU."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.family import Derived, Family, Fixed, Key, dropout_rates, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

NAMES = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "o_proj": "out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
LAYERDROP = Fixed((0.0,), "layers are not dropped in training", training=True)


def _width(hf: Mapping[str, Any]) -> int:
    width: int = hf["hidden_size"]
    if hf.get("word_embed_proj_dim") not in (None, width):
        raise UsageError(
            f"config.json: word_embed_proj_dim must be hidden_size={width}, got {hf['word_embed_proj_dim']}."
        )
    return width // int(hf["num_attention_heads"])


FAMILY = Family(
    name="opt",
    hf_architecture="OPTForCausalLM",
    keys=without(decoder.KEYS, "kv_channels", "norm_epsilon")
    | {
        "ffn_hidden_size": Key("ffn_dim"),
        "num_query_groups": Key("num_attention_heads"),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "activation": decoder.activation("activation_function", default="relu"),
        "qkv_bias": flag("enable_bias", default=True),
        "proj_bias": flag("enable_bias", default=True),
        "mlp_bias": flag("enable_bias", default=True),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": number("init_std", 0.02),
    },
    derived={"kv_channels": Derived(_width, lambda _width, arch: {"word_embed_proj_dim": arch.hidden_size})},
    fixed=decoder.PLAIN_FIXED
    | {
        "do_layer_norm_before": Fixed((True,), "norms after the residual connection are not supported"),
        "_remove_final_layer_norm": Fixed((False,), "models without a last norm are not supported"),
        "layer_norm_elementwise_affine": Fixed((True,), "norms without weights are not supported for this family"),
        "layerdrop": LAYERDROP,
    },
    traits={
        "position": "learned",
        "position_offset": 2,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "gated": False,
    },
    dropout=dropout_rates(attention="attention_dropout") | dropout_rates(0.1, hidden="dropout"),
    rules=renamed(
        (decoder.POSITIONS, *decoder.RULES),
        NAMES | {"model.norm": "model.final_layer_norm", "model.": "model.decoder."},
    ),
)
