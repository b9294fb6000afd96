"""StarCoder2: LayerNorms, biases in all linear layers, an MLP without gate, sliding-window attention."""

from isthmus.families.family import Family, dropout_rates, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="starcoder2",
    hf_architecture="Starcoder2ForCausalLM",
    keys=with_defaults(
        decoder.KEYS,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.018042,
    )
    | {
        "norm_epsilon": number("norm_epsilon", 1e-5),
        "activation": decoder.activation("hidden_act", default="gelu_pytorch_tanh"),
        "qkv_bias": flag("use_bias", default=True),
        "proj_bias": flag("use_bias", default=True),
        "mlp_bias": flag("use_bias", default=True),
    },
    traits={"normalization": "LayerNorm", "gated": False},
    fixed=decoder.PLAIN_FIXED,
    dropout=dropout_rates(attention="attention_dropout", hidden="residual_dropout", embedding="embedding_dropout"),
    sliding_window="always",
    rules=renamed(decoder.RULES, {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)
