"""StableLM: LayerNorms, partial rotary embedding, optionally parallel attention and MLP."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import where

FAMILY = Family(
    name="stablelm",
    hf_architecture="StableLmForCausalLM",
    keys={name: key for name, key in decoder.KEYS.items() if name != "kv_channels"}
    | {
        "num_query_groups": decoder.kv_heads(default=32),
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "qkv_bias": flag("use_qkv_bias"),
        "form": Key("use_parallel_residual", default=False, choices={True: "parallel", False: "pre"}),
    },
    derived={"kv_channels": decoder.HEAD_DIM},
    fixed=decoder.FIXED
    | {
        "qk_layernorm": Fixed((False,), "QK norms with weights for each head are not supported"),
        "hidden_dropout": decoder.NO_MLP_DROPOUT,
    },
    traits={"normalization": "LayerNorm"},
    rope_defaults={"partial_rotary_factor": 0.25},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *where("form=pre", *decoder.MLP_NORM),
        *decoder.MLP,
        *decoder.HEAD,
    ),
)
