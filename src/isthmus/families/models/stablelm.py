"""StableLM: LayerNorms, partial rotary embedding, optionally parallel attention and MLP."""

from isthmus.families.family import Family, Key, with_defaults, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import where

FAMILY = Family(
    name="stablelm",
    hf_architecture="StableLmForCausalLM",
    keys=with_defaults(without(decoder.KEYS, "kv_channels"), num_key_value_heads=32, max_position_embeddings=4096)
    | {
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "qkv_bias": flag("use_qkv_bias"),
        "qk_norm": flag("qk_layernorm"),
        "form": Key("use_parallel_residual", default=False, choices={True: "parallel", False: "pre"}),
    },
    derived={"kv_channels": decoder.HEAD_DIM},
    fixed=decoder.FIXED | {"hidden_dropout": decoder.NO_MLP_DROPOUT},
    traits={"normalization": "LayerNorm", "qk_norm_over": "each_head"},
    rope_defaults={"partial_rotary_factor": 0.25},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.each_head_norms("q_layernorm.norms.{head}.weight", "k_layernorm.norms.{head}.weight"),
        *where("form=pre", *decoder.MLP_NORM),
        *decoder.MLP,
        *decoder.HEAD,
    ),
)
