"""StarCoder2: LayerNorms, biases in all linear layers, an MLP without gate, sliding-window attention."""

from isthmus.families.family import Family, Key, dropout_rate
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="starcoder2",
    hf_architecture="Starcoder2ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": number("norm_epsilon", 1e-5),
        "activation": decoder.activation("hidden_act", default="gelu_pytorch_tanh"),
        "qkv_bias": flag("use_bias", default=True),
        "proj_bias": flag("use_bias", default=True),
        "mlp_bias": flag("use_bias", default=True),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": number("initializer_range", 0.018042),
    },
    traits={"normalization": "LayerNorm", "gated": False},
    fixed=decoder.PLAIN_FIXED,
    dropout={
        "attention": dropout_rate("attention_dropout"),
        "hidden": dropout_rate("residual_dropout"),
        "embedding": dropout_rate("embedding_dropout"),
    },
    sliding_window="always",
    rules=renamed(decoder.RULES, {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)
