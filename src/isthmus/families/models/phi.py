"""Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP, biases also in the output layer, partial rotary embedding."""

from isthmus.families.family import Family, Key, dropout_rates, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="phi",
    hf_architecture="PhiForCausalLM",
    keys=without(decoder.KEYS, "kv_channels")
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="gelu_new"),
        "qk_norm": flag("qk_layernorm"),
    },
    derived={"kv_channels": decoder.HEAD_DIM},
    fixed=decoder.PLAIN_FIXED,
    traits=decoder.BIASED | {"form": "parallel", "normalization": "LayerNorm", "gated": False, "output_bias": True},
    dropout=dropout_rates(attention="attention_dropout", hidden="resid_pdrop", embedding="embd_pdrop"),
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=renamed(
        (*decoder.EMBEDDING, *decoder.INPUT_NORM, *decoder.ATTENTION, *decoder.MLP, *decoder.HEAD),
        {
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "model.norm": "model.final_layernorm",
        },
    ),
)
