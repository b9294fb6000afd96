"""StarCoder2: LayerNorms, biases everywhere, an MLP without a gate, attention through a sliding window."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import copy

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

FAMILY = Family(
    name="starcoder2",
    hf_architecture="Starcoder2ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": Key("norm_epsilon", kind=float, default=1e-5),
        "activation": decoder.activation("hidden_act", default="gelu_pytorch_tanh"),
        "qkv_bias": flag("use_bias", default=True),
        "proj_bias": flag("use_bias", default=True),
        "mlp_bias": flag("use_bias", default=True),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": Key("initializer_range", kind=float, default=0.018042),
    },
    traits={"normalization": "LayerNorm", "gated": False},
    fixed=decoder.PLAIN_FIXED | {"residual_dropout": decoder.NO_DROPOUT, "embedding_dropout": decoder.NO_DROPOUT},
    sliding_window="always",
    rules=(
        *decoder.EMBEDDING,
        *decoder.norm(_LAYER + "input_layernorm", _HF + "input_layernorm"),
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *decoder.norm(_LAYER + "pre_mlp_layernorm", _HF + "post_attention_layernorm"),
        copy(_LAYER + "mlp.linear_fc1.weight", _HF + "mlp.c_fc.weight", "F", "H", shard="rows"),
        copy(_LAYER + "mlp.linear_fc1.bias", _HF + "mlp.c_fc.bias", "F", shard="rows", init="zeros", when="mlp_bias"),
        copy(_LAYER + "mlp.linear_fc2.weight", _HF + "mlp.c_proj.weight", "H", "F", shard="cols"),
        copy(_LAYER + "mlp.linear_fc2.bias", _HF + "mlp.c_proj.bias", "H", init="zeros", when="mlp_bias"),
        *decoder.norm("decoder.final_layernorm", "model.norm"),
        *decoder.HEAD[1:],
    ),
    ignorable=decoder.IGNORABLE,
)
